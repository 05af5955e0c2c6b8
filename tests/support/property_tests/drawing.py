"""Draw the features of a case."""

from hypothesis import strategies as st

from property_tests.features import FEATURES


@st.composite
def compatible(draw, excluded):
    """Draw features that go together."""
    kept = []
    for feature in draw(st.permutations(FEATURES))[: 3 + draw(st.integers(0, 6))]:
        if not any((feature, other) in excluded or (other, feature) in excluded for other in kept):
            kept.append(feature)
    return set(kept)
