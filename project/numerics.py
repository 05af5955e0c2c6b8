"""Compare the numbers of the environments that tox ran: `python project/numerics.py` writes pages/numbers.md.

Each test of a golden trajectory leaves its distance from NumPy's and its final weights in the JUnit report of its
environment. The tests of conventions leave the defaults of TensorFlow's own optimizers. Nothing is typed by hand.
"""

import argparse
import json
import os
import xml.etree.ElementTree as ElementTree

from environments import data as matrix

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)

HEAD = """\
# The same numbers everywhere

`python project/numerics.py` writes this page from the test reports of {count} environments on {system}. Nothing
here is typed by hand.

## Golden trajectories

Every interface (optimizer, model, static graph) makes ten steps with six optimizers on micro-batches of unequal size
(5 + 4 + 3). The weights are compared with NumPy in float64 (`tests/support/golden`). The tests allow a difference of
2e-6 for weights of order one.

The last two columns compare the final weights with those of a neighbour, over the trajectories that both ran; 0 means
identical bits. One neighbour is the previous TensorFlow on the same Python, or on the nearest Python that it supports.
The other is the same TensorFlow on the previous Python.

"""

CONVENTIONS = """
## Where TensorFlow itself changed

This list shows how TensorFlow's own optimizers, without accum, change from one version to the next. "First steps" are
those of a weight with gradient 0.5, learning rate 0.5 and, if the optimizer has one, epsilon 1. They show where epsilon
is added and from which value accumulators start. This matters if you take hyperparameters from one TensorFlow version
to another, or from `tf.compat.v1` to Keras.

"""

STANDING = """
Some differences between `tf.compat.v1` and Keras hold for every version:

- Adagrad in `tf.compat.v1` has no epsilon. In Keras it has one, inside or outside the square root, depending on the
  version and on the family of optimizers.
- RMSprop starts its mean square from one in `tf.compat.v1`, and from zero in Keras.
- The default epsilon of Adam is 1e-8 in `tf.compat.v1` and 1e-7 in Keras; that of RMSprop is 1e-10 and 1e-7.
- Momentum in `tf.compat.v1` is a sum of gradients, and in Keras a sum of steps. They differ once the learning rate
  changes.
"""


def read(path):
    """({test: {"off", "weights"}}, {what: defaults or steps}) of a JUnit report."""
    golden, conventions = {}, {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        said = {prop.get("name"): json.loads(prop.get("value")) for prop in case.iter("property")}
        if "golden" in said:
            golden[case.get("name")] = {"off": said["golden"]["off"], "weights": said["weights"]}
        else:
            conventions.update(said)
    return golden, conventions


def environments_of(folder, system):
    """[(environment, version, python, golden, conventions)] of the reports in a folder, in the order of the matrix."""
    reports = []
    for name, version, python, _ in matrix.environments(system):
        path = os.path.join(folder, name + ".xml")
        if os.path.exists(path):
            reports.append((name, version, python) + read(path))
    return reports


def difference(one, other):
    """The largest difference between the weights of two environments in tests that both ran, or None."""
    shared = sorted(set(one) & set(other))
    differences = [abs(a - b) for test in shared for a, b in zip(one[test]["weights"], other[test]["weights"])]
    return max(differences) if differences else None


def neighbours(env_name, env_names):
    """Returns the environments of the previous version and of the previous Python; None if it did not run."""
    name, version, python = env_name[:3]
    alike = [other for other in env_names if other[0].endswith("-keras2") == name.endswith("-keras2")]
    minor = lambda other: int(other[2].split(".")[1])
    versions = [
        other_version
        for other_version in matrix.VERSIONS[: matrix.VERSIONS.index(version)]
        if any(other_version == other[1] for other in alike)
    ]
    before = [other for other in alike if versions and other[1] == versions[-1]]
    before = min(before, key=lambda other: abs(minor(other) - minor(env_name)), default=None)
    younger = [other for other in alike if other[1] == version and minor(other) < minor(env_name)]
    return before, max(younger, key=minor, default=None)


def _interface(test):
    """The name of a golden test as readers see it: static graph in a session[…]."""
    name, bracket, case = test.partition("[")
    for word, other in (("test_", ""), ("_follows_the_golden_trajectory", ""), ("graph_api", "static_graph")):
        name = name.replace(word, other)
    return name.replace("_api", "").replace("_", " ") + bracket + case


def _number(value):
    return "–" if value is None else "0" if value == 0 else f"{value:.1e}"


def table(env_names):
    """Lines of the table of deviations."""
    lines = [
        "| environment | trajectories | from NumPy | in | from the previous TensorFlow | from the previous Python |"
    ]
    lines.append("|---" * 6 + "|")
    for env_name in env_names:
        golden = env_name[3]
        if not golden:
            lines.append(f"| {env_name[0]} | 0 | – | – | – | – |")
            continue
        worst = max(golden, key=lambda test: golden[test]["off"])
        apart = [other and difference(golden, other[3]) for other in neighbours(env_name, env_names)]
        lines.append(
            "| {} | {} | {} | {} | {} | {} |".format(
                env_name[0],
                len(golden),
                _number(golden[worst]["off"]),
                _interface(worst),
                *[
                    f"{_number(value)} ({other[0]})" if other and value is not None else "–"
                    for value, other in zip(apart, neighbours(env_name, env_names))
                ],
            )
        )
    return lines


def _leaves(value, path=()):
    if isinstance(value, dict):
        return [leaf for key, inner in sorted(value.items()) for leaf in _leaves(inner, path + (key,))]
    return [(path, value)]


def changes(env_names):
    """Lines that list the changes in conventions from each environment to the next that reports them."""
    last, lines = {}, []
    for env_name in env_names:
        for what, told in sorted(env_name[4].items()):
            kind = what + (" (tf-keras)" if env_name[0].endswith("-keras2") else "")
            for path, value in _leaves(told):
                key = (kind,) + path
                if key in last and last[key] != value:
                    where = f"{kind}: {' '.join(path)}"
                    lines.append(f"- {where}: {last[key]} → {value}, from {env_name[0]} on")
                last[key] = value
    return lines or ["- Nothing changes in these environments."]


def page(env_names, system):
    """The text of pages/numbers.md."""
    head = HEAD.format(count=len(env_names), system=matrix.SYSTEMS[system])
    return head + "\n".join(table(env_names)) + "\n" + CONVENTIONS + "\n".join(changes(env_names)) + "\n" + STANDING


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--junit", default=os.path.join(ROOT, ".tox", "junit"), help="the folder of reports")
    parser.add_argument("--system", default="linux", choices=sorted(matrix.SYSTEMS))
    parser.add_argument("--output", default=os.path.join(HERE, "pages", "numbers.md"))
    arguments = parser.parse_args(argv)
    env_names = environments_of(arguments.junit, arguments.system)
    if not env_names:
        parser.error(f"no report of an environment in {arguments.junit}")
    with open(arguments.output, "w", encoding="utf-8", newline="\n") as file:
        file.write(page(env_names, arguments.system))
    print(f"{len(env_names)} environments, {sum(len(env_name[3]) for env_name in env_names)} trajectories")


if __name__ == "__main__":
    main()
