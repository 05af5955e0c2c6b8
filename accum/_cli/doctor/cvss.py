"""The rating of a CVSS 3 vector, such as "CVSS:3.1/AV:L/AC:L/PR:L/UI:N/S:U/C:N/I:N/A:H", by its base score.

Source: CVSS v3.1 specification, section 7.1 (base metrics equations), 7.4 (metric values) and 5 (ratings).
"""

import math
from typing import Optional

_VALUES = {
    "AV": {"N": 0.85, "A": 0.62, "L": 0.55, "P": 0.2},
    "AC": {"L": 0.77, "H": 0.44},
    "PR": {"N": 0.85, "L": 0.62, "H": 0.27},
    "UI": {"N": 0.85, "R": 0.62},
    "C": {"H": 0.56, "L": 0.22, "N": 0.0},
    "I": {"H": 0.56, "L": 0.22, "N": 0.0},
    "A": {"H": 0.56, "L": 0.22, "N": 0.0},
}
_PR_IF_CHANGED = {"N": 0.85, "L": 0.68, "H": 0.5}
_RATINGS = ((9.0, "critical"), (7.0, "high"), (4.0, "medium"), (0.1, "low"))


def rating(vector: str) -> Optional[str]:
    """Return "low", "medium", "high" or "critical"; None for a score of 0, or a vector that is not one of CVSS 3."""
    score = base_score(vector)
    return None if score is None else next((word for least, word in _RATINGS if score >= least), None)


def base_score(vector: str) -> Optional[float]:
    """The base score, from 0 to 10; None if the vector is not one of CVSS 3."""
    if not vector.startswith("CVSS:3."):
        return None
    metrics = dict(part.partition(":")[::2] for part in vector.split("/")[1:])
    is_changed = metrics.get("S") == "C"
    try:
        values = {name: of[metrics[name]] for name, of in _VALUES.items()}
    except KeyError:
        return None
    if is_changed:
        values["PR"] = _PR_IF_CHANGED[metrics["PR"]]
    missed = 1 - (1 - values["C"]) * (1 - values["I"]) * (1 - values["A"])
    impact = 7.52 * (missed - 0.029) - 3.25 * (missed - 0.02) ** 15 if is_changed else 6.42 * missed
    if impact <= 0:
        return 0.0
    exploitability = 8.22 * values["AV"] * values["AC"] * values["PR"] * values["UI"]
    return _rounded_up(min((1.08 if is_changed else 1.0) * (impact + exploitability), 10))


def _rounded_up(score):
    """To one decimal; by whole numbers, as the specification's appendix A does, because 4.02 may be 4.0199999."""
    hundred_thousandths = int(round(score * 100000))
    if hundred_thousandths % 10000 == 0:
        return hundred_thousandths / 100000
    return (math.floor(hundred_thousandths / 10000) + 1) / 10
