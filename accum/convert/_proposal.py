"""Propose which variables of two networks belong together, by their names, shapes and order, or say what is undecided.

Nothing is converted by a proposal until the user passes it as `names`.
"""

import json
import re
from typing import Any, Dict, List, NamedTuple, Tuple

from accum.convert._shapes import arrangement
from accum.convert._words import facts_of, has_library_name, library_number

Shapes = Dict[Any, Tuple[str, Tuple[int, ...]]]

BY_NAMES = "the words and numbers in the names, and by the shapes"
BY_ORDER = "the order in which the two sides made their variables, and by the shapes"


class Proposal(NamedTuple):
    """A pairing of all variables, or the reasons why there is none.

    Attributes:
      pairs: {index in the model: name in the graph}; empty if something is undecided.
      evidence: what it is based on.
      reasons: list of str.
    """

    pairs: Dict[int, str]
    evidence: str
    reasons: List[str]


def propose(ours: Shapes, theirs: Dict[str, Tuple[int, ...]], is_ordered: bool) -> Proposal:
    """Pair each of `ours`, {index: (name, shape)}, with one of `theirs`, {name: shape}.

    Names decide if they pair every variable. Otherwise the order does, if `theirs` is in the order of creation, every
    position agrees in shape and role, and no name contradicts.
    """
    pairing = _Pairing(ours, theirs)
    by_names = pairing.by_names()
    if len(by_names) == len(ours):
        return Proposal(by_names, BY_NAMES, [])
    reasons = [pairing.undecided(index, by_names) for index in ours if index not in by_names]
    if not is_ordered:
        return Proposal({}, "", reasons + ["The order of creation is unknown without the checkpoint's `.meta` file."])
    by_order, reason = pairing.by_order({})
    if reason:  # names and shapes may decide what the two sides have made in another order, such as embeddings
        by_order, reason = pairing.by_order(by_names)
    contradicted = [index for index, name in by_names.items() if by_order.get(index, name) != name]
    for index in contradicted[:1]:
        reason = (
            f"The order of creation contradicts the names: it pairs {ours[index][0]} with {by_order[index]}, and the "
            f"names with {by_names[index]}."
        )
    return Proposal({}, "", reasons + [reason]) if reason else Proposal(by_order, BY_ORDER, [])


class _Pairing:
    def __init__(self, ours, theirs):
        self._ours, self._theirs = ours, theirs
        self._facts = facts_of(ours)
        self._their_facts = facts_of({name: (name, shape) for name, shape in theirs.items()})
        self._fitting = {index: [name for name in theirs if self._may_be(index, name)] for index in ours}

    def _may_be(self, index, name):
        """Whether shape and role agree, and the numbers of the layers do not contradict."""
        one, other = self._facts[index], self._their_facts[name]
        return (
            arrangement(self._theirs[name], self._ours[index][1]) is not None
            and (one.role == other.role or None in (one.role, other.role))
            and one.is_of_norm == other.is_of_norm
            and all(ours == theirs for ours, theirs in zip(one.positions, other.positions))
        )

    def _score(self, index, name):
        """Return how much two names have in common, and whether the shape is the same."""
        one, other = self._facts[index].words, self._their_facts[name].words
        return len(one & other) / (len(one | other) or 1), tuple(self._theirs[name]) == tuple(self._ours[index][1])

    # ------------------------------------------------------------------------------------------------------------
    # By names

    def by_names(self):
        """Return {index: name} of what has exactly one counterpart, or one that is closer than all others."""
        pairs = self._same_names()
        while True:
            more = self._only(self._left(pairs)) or self._closest(self._left(pairs))
            if not more:
                return pairs
            pairs.update(more)

    def _same_names(self):
        """Return {index: name} of equal names, except those in which a library has numbered layers."""
        names = {name: index for index, (name, _) in self._ours.items() if not has_library_name(name)}
        return {names[name]: name for name in self._theirs if name in names and name in self._fitting[names[name]]}

    def _left(self, pairs):
        """Return {index: names} that are possible besides `pairs`; what is in one layer stays in one layer."""
        taken = set(pairs.values())
        layers, back = {}, {}
        for index, name in pairs.items():
            one, other = self._facts[index].scope, self._their_facts[name].scope
            if one is not None and other is not None:
                layers[one], back[other] = other, one

        def is_of_layer(index, name):
            one, other = self._facts[index].scope, self._their_facts[name].scope
            if one is None or other is None:
                return True
            return layers.get(one, other) == other and back.get(other, one) == one

        return {
            index: [name for name in names if name not in taken and is_of_layer(index, name)]
            for index, names in self._fitting.items()
            if index not in pairs
        }

    def _only(self, left):
        counts: Dict[str, int] = {}
        for names in left.values():
            for name in names:
                counts[name] = counts.get(name, 0) + 1
        return {index: names[0] for index, names in left.items() if len(names) == 1 and counts[names[0]] == 1}

    def _closest(self, left):
        scores = {(index, name): self._score(index, name) for index, names in left.items() for name in names}
        ours: Dict[Any, List[Any]] = {}
        theirs: Dict[Any, List[Any]] = {}
        for (index, name), score in scores.items():
            ours.setdefault(index, []).append(score)
            theirs.setdefault(name, []).append(score)
        return {
            index: name
            for (index, name), score in scores.items()
            if score[0] > 0.0
            and all(score == max(scores) and scores.count(score) == 1 for scores in (ours[index], theirs[name]))
        }

    def undecided(self, index, pairs):
        """Say what a variable could be paired with besides `pairs`."""
        name, shape = self._ours[index]
        names = self._left(pairs)[index]
        if not names:
            return f"Nothing fits {name} {list(shape)}."
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{name} {list(shape)} could be {', '.join(names[:3])}{more}."

    # ------------------------------------------------------------------------------------------------------------
    # By order

    def by_order(self, pairs):
        """Return ({index: name}, "") by the order within each role besides `pairs`, or ({}, the reason for none)."""
        ours = {index: self._facts[index] for index in self._as_created() if index not in pairs}
        taken = set(pairs.values())
        theirs = {name: facts for name, facts in self._their_facts.items() if name not in taken}
        ours, theirs, pairs = self._by_role(ours), self._by_role(theirs), dict(pairs)
        for role in sorted(set(ours) | set(theirs), key=str):
            one, other = ours.get(role, []), theirs.get(role, [])
            if len(one) != len(other):
                return {}, (
                    f"The order does not tell: the model has {len(one)} variables of the role {role or 'unknown'!r}, "
                    f"and the static graph {len(other)}."
                )
            for index, name in zip(one, other):
                if name not in self._fitting[index]:
                    name_here, shape = self._ours[index]
                    return {}, (
                        f"The order does not tell: {name_here} {list(shape)} would be {name} "
                        f"{list(self._theirs[name])}."
                    )
                pairs[index] = name
        return pairs, ""

    def _as_created(self):
        """Return the indices of ours with the layers that a library has numbered in the order of their numbers.

        A functional model lists its layers by depth, so a shortcut comes after layers that were made later.
        """
        indices_of_kind: Dict[Any, List[Any]] = {}
        for index, (name, _) in self._ours.items():
            indices_of_kind.setdefault(library_number(name)[0], []).append(index)
        order = list(self._ours)
        for kind, indices in indices_of_kind.items():
            if kind is not None:
                numbers = {index: library_number(self._ours[index][0])[1] for index in indices}
                for index, moved in zip(indices, sorted(indices, key=numbers.__getitem__)):
                    order[list(self._ours).index(index)] = moved
        return order

    def _by_role(self, facts):
        by_role: Dict[Any, List[Any]] = {}
        for key, one in facts.items():
            by_role.setdefault(one.role, []).append(key)
        return by_role


# ----------------------------------------------------------------------------------------------------------------
# As text


def passed_back(wanted, pairs):
    """Return `pairs`, {index: name or None}, in the form of `names`; a list if two names of the model are the same."""
    if len({wanted[index][0] for index in pairs}) == len(pairs):
        return {wanted[index][0]: name for index, name in sorted(pairs.items())}
    return [pairs.get(index) for index in range(len(wanted))]


def lists(lost, left):
    """Return lines with the variables of both sides that match nothing, by position, with their shapes."""
    lines = ["The model's:"] + [f"  [{index}] {name} {list(shape)}" for index, (name, shape) in lost.items()]
    return lines + ["The static graph's:"] + [f"  [{index}] {name} {list(shape)}" for index, name, shape in left]


def as_text(proposal, names):
    """Return lines that propose `names`, or say why nothing is proposed."""
    if proposal.pairs:
        said_as = json.dumps(names)
        return [f"A proposal by {proposal.evidence}; check it before you pass it on:", f"  names={said_as}"]
    return ["Nothing is proposed:"] + [f"  {reason}" for reason in proposal.reasons[:5] + proposal.reasons[5:][-1:]]


def natural(name):
    """A key that sorts `layer_10` after `layer_2`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
