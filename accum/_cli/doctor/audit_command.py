"""`doctor --audit` and `doctor --sbom`: list the installed packages from metadata alone, with their advisories."""

import datetime
import json
import os
import sys

import accum
from accum._cli.doctor import accepted, audit, checks, cyclonedx, drift, fixes, locks, osv, sbom, spdx

SBOM_FORMATS = {"cyclonedx": cyclonedx.text, "spdx": spdx.text}


def perform(arguments, parser, case):
    """Audit an environment, or write its bill of materials, or both. Returns the exit status."""
    record = locks.read()
    packages = {name: copies[0].version for name, copies in case.facts.packages.items()}
    advisory_list, looked_up, advisories = _advisories(arguments, parser, case, record, packages, case.version)
    if arguments.sbom:
        name = drift.name(case, record)
        lock = locks.lock(record, name) if name else None
        components = sbom.of_environment(case.facts.packages, record, lock, case.facts.system)
        subject = f"environment of Python {case.facts.python} on {case.facts.system}, lock {name or 'unknown'}"
        _write_sbom(arguments, subject, components, advisory_list, advisories, case.holder and case.holder.name)
    return (
        _print_audit(arguments, parser, case, audit.report(advisory_list, advisories, looked_up))
        if arguments.audit
        else 0
    )


def write_bill_of_lock(arguments, parser, case, record, lock, system):
    """Write the bill of materials of a lock, whatever is installed here. Returns the exit status."""
    pins = lock.packages[system]
    version = locks.tensorflow(pins)
    advisory_list, _, advisories = _advisories(arguments, parser, case, record, pins, version)
    name = next(name for name in ("tensorflow", "tensorflow-cpu", "tensorflow-macos") if name in pins)
    _write_sbom(
        arguments,
        f"lock {lock.env_name} on {system}",
        sbom.of_lock(record, lock, system),
        advisory_list,
        advisories,
        name,
    )
    return 0


def _advisories(arguments, parser, case, record, packages, version):
    """(record of advisories, {package: version} looked up in it, what was found)"""
    looked_up = {name: of for name, of in packages.items() if name not in checks.DISTRIBUTIONS}
    if version:
        looked_up["tensorflow"] = version
    try:
        advisory_list = osv.read(arguments.advisories) if arguments.advisories else fixes.read()
    except osv.Unreadable as error:
        parser.error(f"--advisories: {error}")
    if not arguments.advisories:
        if arguments.audit and not version:
            parser.error("--audit: TensorFlow is not installed here. Pass --advisories to audit other packages.")
        looked_up = {name: of for name, of in looked_up.items() if name in advisory_list["packages"]}
    locked = drift.pins(case, record)
    locked = dict(locked, tensorflow=drift.newest_tensorflow(case, record)) if locked else {}
    return advisory_list, looked_up, audit.find(advisory_list, looked_up, locked, record["date"])


def _print_audit(arguments, parser, case, report):
    today = datetime.date.today()
    about = f"{case.version or 'none'} on Python {case.facts.python}, {case.facts.system}"
    audited = {"Audited": f"{today.isoformat()} by accum {accum.__version__}", "TensorFlow": about}
    report = dict({"audited": audited}, **report)
    if arguments.accept:
        try:
            acceptances = accepted.read(arguments.accept)
        except accepted.Unreadable as error:
            parser.error(f"--accept: {error}")
        report["accepted_but_not_found"] = accepted.apply(acceptances, report["advisories"], today)
        report["accepted_list"] = os.path.basename(arguments.accept)
    print(json.dumps(report, indent=2) if arguments.json else audit.text(report))
    return int(any(map(audit.is_open, report["advisories"])))


def _write_sbom(arguments, subject, components, advisory_list, advisories, tensorflow):
    """Write a bill of materials, and what it holds and lacks to stderr."""
    bill = sbom.Bill(subject, components, sbom.now(), accum.__version__, arguments.files)
    render = SBOM_FORMATS[arguments.sbom_format or "cyclonedx"]
    if arguments.advisories:
        # TensorFlow's advisories concern the distribution that is installed.
        named = [one._replace(package=tensorflow) if one.package == "tensorflow" else one for one in advisories]
        says, text = f"{len(advisories)} advisories", render(
            bill, named, f"{advisory_list['source']}, as of {advisory_list['date']}"
        )
    else:  # part of them would read as if it were all
        says, text = "no advisories, because no --advisories were passed", render(bill)
    with open(arguments.sbom, "w", encoding="utf-8") as file:
        file.write(text)
    lacks = "".join(f", {number} without {what}" for what, number in sbom.lacking(components).items())
    print(f"{arguments.sbom}: {len(components)} packages{lacks}; {says}", file=sys.stderr)
