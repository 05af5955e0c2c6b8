"""The license that a package declares, as an SPDX expression where its words are clear.

An installed package declares it in its metadata. For the packages of the locks, `licenses.json` holds the license from
the metadata of one version: null if they declare none, and "BSD" if they do not name the variant.
"""

import json
import os
import re
from typing import Dict, NamedTuple, Optional

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "licenses.json")

_WORDS = {
    "Apache-2.0": ("apache", "apache 2", "apache 2.0", "apache license", "apache license 2.0", "apache license v2.0")
    + ("apache license, version 2.0", "apache software license", "apache software license 2.0"),
    "MIT": ("mit license", "the mit license"),
    "BSD-2-Clause": ("bsd 2-clause", "bsd 2-clause license", "2-clause bsd license"),
    "BSD-3-Clause": ("bsd 3-clause", "bsd 3-clause license", "3-clause bsd license", "new bsd", "modified bsd license"),
    "ISC": ("isc license", "isc license (iscl)"),
    "MPL-2.0": ("mozilla public license 2.0 (mpl 2.0)",),
    "NCSA": ("university of illinois/ncsa open source license",),
    "PSF-2.0": ("psf", "python software foundation license"),
}
_IDS = {"MIT-0", "MIT-CMU", "0BSD", "Zlib", "CC0-1.0", "Unlicense", "LGPL-3.0-only", "LGPL-2.1-or-later", "HPND"}
_EXPRESSIONS = {words: name for name in _WORDS for words in _WORDS[name] + (name.lower(),)}
_EXPRESSIONS.update({name.lower(): name for name in _IDS})


class License(NamedTuple):
    """`expression` is None if the words are not clear, both are None if there are none."""

    expression: Optional[str]
    words: Optional[str]


def read() -> Dict[str, Optional[str]]:
    """{package: what it declares} for the packages of the locks."""
    with open(PATH, encoding="utf-8") as file:
        return json.load(file)["licenses"]


def of(expression: Optional[str], words, recorded: Optional[str]) -> License:
    """The license of a package.

    Args:
        expression: the field License-Expression of its metadata.
        words: what its field License and its classifiers say.
        recorded: what `read` has for it.
    """
    said = [text for text in [expression, *words, recorded] if text and text.upper() != "UNKNOWN" and len(text) < 100]
    for text in said:
        if text == expression or (text == recorded and _is_expression(text)):
            return License(text, text)
        if text.lower() in _EXPRESSIONS:
            return License(_EXPRESSIONS[text.lower()], text)
    return License(None, said[0] if said else None)


def _is_expression(text):
    return all(part.lower() in _EXPRESSIONS for part in re.split(r" OR | AND ", text))
