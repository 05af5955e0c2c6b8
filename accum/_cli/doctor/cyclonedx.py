"""Write a bill of materials as CycloneDX 1.5 in JSON.

Source: https://cyclonedx.org/docs/1.5/json/
"""

import json
from typing import Any, Dict, List

from accum._cli.doctor import sbom


def text(bill: sbom.Bill, advisories=(), source: str = "") -> str:
    """The document, with the advisories of an audit, whose packages are components."""
    purls = {one.name: one.purl for one in bill.components}
    document: Dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{bill.uuid}",
        "version": 1,
        "metadata": {
            "timestamp": bill.created,
            "tools": {"components": [{"type": "application", "name": "accum", "version": bill.tool}]},
            "component": {"type": "application", "bom-ref": "subject", "name": bill.subject},
        },
        "components": [_component(bill, one) for one in bill.components],
        "dependencies": [{"ref": "subject", "dependsOn": sorted(purls.values())}],
    }
    if advisories:
        document["vulnerabilities"] = [_vulnerability(advisory, purls, source) for advisory in advisories]
    return json.dumps(document, indent=2) + "\n"


def _component(bill, one):
    component = {"type": "library", "bom-ref": one.purl, "name": one.name, "version": one.version, "purl": one.purl}
    if one.license.expression:
        component["licenses"] = [{"expression": one.license.expression}]
    elif one.license.words:
        component["licenses"] = [{"license": {"name": one.license.words}}]
    if len(one.files) == 1:  # of several files, it is not known which one was installed
        component["hashes"] = _hashes(one.files[0])
    if one.files:
        component["externalReferences"] = [
            {"type": "distribution", "url": bill.where(file), "hashes": _hashes(file)} for file in one.files
        ]
    return component


def _hashes(file):
    return [{"alg": "SHA-256", "content": file.sha256}]


def _vulnerability(advisory, purls, source):
    ref = purls[advisory.package]
    vulnerability: Dict[str, Any] = {"bom-ref": f"{advisory.id} {ref}", "id": advisory.id, "source": {"name": source}}
    if advisory.severity in ("critical", "high", "medium", "low"):
        vulnerability["ratings"] = [{"severity": advisory.severity}]
    references: List[Any] = [{"id": name, "source": {"name": source}} for name in advisory.aliases]
    vulnerability.update({"references": references} if references else {})
    vulnerability.update(recommendation=advisory.says, affects=[{"ref": ref}])
    return vulnerability
