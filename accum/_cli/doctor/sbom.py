"""Write a software bill of materials in CycloneDX, by cyclonedx-python-lib.

The library's names changed between its versions for Python 3.6 and today's; what is used here is in all of them.
"""

import importlib.util

NO_LIBRARY = 'it needs cyclonedx-python-lib, which is not installed: python -m pip install "cyclonedx-python-lib"'


def is_possible():
    """Whether the library is installed."""
    return importlib.util.find_spec("cyclonedx") is not None


def bom(packages, advisories=(), source=""):
    """A CycloneDX 1.4 document, as text: the packages {name: version}, and advisories on them from a source."""
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component
    from cyclonedx.output.json import JsonV1Dot4
    from packageurl import PackageURL

    document = Bom()
    components = {}
    for name, version in sorted(packages.items()):
        purl = PackageURL("pypi", name=name, version=version)
        components[name] = Component(name=name, version=version, purl=purl, bom_ref=purl.to_string())
        document.components.add(components[name])
    for advisory in advisories:
        component = components[advisory.package]
        found = _vulnerability(advisory, component.bom_ref.value, source)
        if hasattr(document, "vulnerabilities"):
            document.vulnerabilities.add(found)
        else:  # before cyclonedx-python-lib 4
            component.add_vulnerability(found)
    return JsonV1Dot4(document).output_as_string()


def _vulnerability(advisory, ref, source):
    from cyclonedx.model.vulnerability import BomTarget, Vulnerability, VulnerabilitySource

    found = Vulnerability(bom_ref=f"{advisory.id} {ref}", id=advisory.id, source=VulnerabilitySource(name=source))
    found.recommendation = advisory.says
    found.affects = [BomTarget(ref=ref)]
    return found
