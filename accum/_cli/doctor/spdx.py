"""Write a bill of materials as SPDX 2.3 in JSON.

Source: https://spdx.github.io/spdx-spec/v2.3/
"""

import json
from typing import Any, Dict

from accum._cli.doctor import sbom

NOTHING = "NOASSERTION"


def text(bill: sbom.Bill, advisories=(), source: str = "") -> str:
    """The document, with the advisories of an audit as references of their packages."""
    subject = {
        "SPDXID": "SPDXRef-Subject",
        "name": bill.subject,
        "downloadLocation": NOTHING,
        "filesAnalyzed": False,
        "primaryPackagePurpose": "APPLICATION",
    }
    document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": bill.subject,
        "documentNamespace": f"https://spdx.org/spdxdocs/accum-{bill.uuid}",
        "creationInfo": {"created": bill.created, "creators": [f"Tool: accum-{bill.tool}"]},
        "packages": [subject] + [_package(bill, one, advisories, source) for one in bill.components],
        "relationships": [_relation("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-Subject")]
        + [_relation("SPDXRef-Subject", "CONTAINS", _id(one)) for one in bill.components],
    }
    return json.dumps(document, indent=2) + "\n"


def _id(one):
    return f"SPDXRef-Package-{one.name}"


def _relation(element, kind, related):
    return {"spdxElementId": element, "relationshipType": kind, "relatedSpdxElement": related}


def _package(bill, one, advisories, source):
    package: Dict[str, Any] = {
        "SPDXID": _id(one),
        "name": one.name,
        "versionInfo": one.version,
        "downloadLocation": NOTHING,
        "filesAnalyzed": False,
        "licenseConcluded": NOTHING,
        "licenseDeclared": one.license.expression or NOTHING,
        "copyrightText": NOTHING,
        "externalRefs": [_reference(one.purl)] + [_reference(one.purl_of(file)) for file in one.files],
    }
    if one.license.words and not one.license.expression:
        package["licenseComments"] = f"The metadata of the package say: {one.license.words}"
    if len(one.files) == 1:  # of several files, it is not known which one was installed
        package["packageFileName"] = one.files[0].name
        package["checksums"] = [{"algorithm": "SHA256", "checksumValue": one.files[0].sha256}]
        package["downloadLocation"] = bill.where(one.files[0]) if bill.url else NOTHING
    for advisory in advisories:
        if advisory.package == one.name:
            package["externalRefs"].append(
                {
                    "referenceCategory": "SECURITY",
                    "referenceType": "advisory",
                    "referenceLocator": f"https://osv.dev/vulnerability/{advisory.id}",
                    "comment": f"{advisory.says}. Source: {source}",
                }
            )
    return package


def _reference(purl):
    return {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl}
