"""Plant mistakes that nobody chose in the sources, and see for each whether a quick test fails.

    python project/generated_mutants.py map FOLDER               find which tests run which lines, by coverage.py
    python project/generated_mutants.py map FOLDER --add --marks slow --tests tests/graph/test_single.py
    python project/generated_mutants.py run FOLDER --count 200   plant that many more, and record what they did
    python project/generated_mutants.py run FOLDER --survivors --tests tests/keras/test_new.py
    python project/generated_mutants.py page                     write pages/generated-mutants.md

A mutant is one small change: another comparison or constant, a statement that is left out, two arguments swapped, a
branch negated, a context that is not entered. It is planted in a copy of the sources in FOLDER. TensorFlow is imported
once; each mutant has a process of its own, forked from there, in which pytest runs the tests that reach the changed
line, quick ones first, until one fails. Which mutants are taken is drawn by a seed, in turns from each part of the
sources, and a run goes on where the last one stopped.

Tools such as mutmut rewrite every function so that a mutant can be chosen while the program runs. AutoGraph and the
tests that read sources would see that, so here a file has one mutant at a time, and its lines stay where they are.

Python 3.8 or later, on Linux, with TensorFlow, pytest and, for `map`, coverage.
"""

import argparse
import ast
import datetime
import glob
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
RECORD, PAGE = (
    os.path.join(HERE, "records", "generated-mutants.json"),
    os.path.join(HERE, "pages", "generated-mutants.md"),
)
BEGIN, END = "<!-- generated mutants -->\n", "<!-- end of generated mutants -->\n"
PARTS = (
    "accum/_engine",
    "accum/_keras/_steps",
    "accum/_keras/_optimizer",
    "accum/_keras/_model",
    "compat/v1",
)

COMPARISONS = {"==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">"}
COMPARISONS.update({"is not": "is", "is": "is not", "not in": "in", "in": "not in"})
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "|": "&", "&": "|"}
FUNCTIONS = {"equal": "not_equal", "not_equal": "equal", "greater": "greater_equal", "greater_equal": "greater"}
FUNCTIONS.update({"less": "less_equal", "less_equal": "less", "logical_and": "logical_or", "logical_or": "logical_and"})
SYMMETRIC = [
    "equal",
    "not_equal",
    "logical_and",
    "logical_or",
    "maximum",
    "minimum",
    "max",
    "min",
    "add",
    "multiply",
    "add_n",
]
ASKED = ["isinstance", "hasattr", "getattr", "setattr", "cast", "warn", "pop", "get", "join", "replace", "startswith"]
"""Functions whose arguments may be swapped, and those where this is no mistake that anybody makes."""

SECONDS, TESTS = 20.0, 40
"""What the tests of one mutant may take, by the times of `map`, and how many there may be."""


class Mutant(NamedTuple):
    """One change of a source. `start` and `end` are places in its bytes."""

    path: str
    function: str
    operator: str
    line: int
    start: int
    end: int
    text: str


# ----------------------------------------------------------------------------------------------------------------------
# Making mutants


class Source(ast.NodeVisitor):
    """Finds the mutants of one file."""

    def __init__(self, path, text):
        self.mutants, self._path, self._bytes = [], path, text.encode("utf-8")
        self._names, self._functions = [], 0
        self._starts = [0]
        for line in self._bytes.splitlines(True):
            self._starts.append(self._starts[-1] + len(line))
        self.visit(ast.parse(text))

    def _span(self, node):
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node):
        start, end = self._span(node)
        return self._bytes[start:end].decode("utf-8")

    def _add(self, operator, node, text, span=None):
        if self._functions:  # what runs at import reaches every test
            start, end = span or self._span(node)
            text += "\n" * (self._bytes[start:end].count(b"\n") - text.count("\n"))  # no other line moves
            self.mutants.append(Mutant(self._path, ".".join(self._names), operator, node.lineno, start, end, text))

    def _replace_between(self, operator, node, before, after, table):
        """Replace the token that stands between two nodes."""
        start, end = self._span(before)[1], self._span(after)[0]
        between = self._bytes[start:end].decode("utf-8")
        for token in sorted(table, key=len, reverse=True):
            pattern = r"\b{}\b" if token[0].isalpha() else r"{}"
            match = re.search(pattern.format(re.escape(token).replace(r"\ ", r"\s+")), between)
            if match:
                text = between[: match.start()] + table[token] + between[match.end() :]
                self._add(operator, node, text, (start, end))
                return

    def _visit_named(self, node):
        self._names.append(node.name)
        self._functions += isinstance(node, ast.FunctionDef)
        for child in node.body:
            self.visit(child)
        self._functions -= isinstance(node, ast.FunctionDef)
        self._names.pop()

    visit_FunctionDef = visit_ClassDef = _visit_named

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node):
        pass

    def visit_Raise(self, node):
        self._add("deleted statement", node, "pass")

    def visit_Compare(self, node):
        if len(node.ops) == 1:
            self._replace_between("comparison", node, node.left, node.comparators[0], COMPARISONS)
        self.generic_visit(node)

    def visit_BinOp(self, node):
        if not isinstance(node.op, ast.Pow):
            self._replace_between("arithmetic", node, node.left, node.right, ARITHMETIC)
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        self._replace_between("comparison", node, node.values[0], node.values[1], {"and": "or", "or": "and"})
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            self._add("negated branch", node, "bool({})".format(self._text(node.operand)))
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            self._add("constant", node, str(not node.value))
        elif isinstance(node.value, (int, float)):
            self._add("constant", node, repr(node.value + 1))

    def _visit_branch(self, node):
        if not isinstance(node.test, ast.UnaryOp) and self._text(node.test) != "TYPE_CHECKING":
            self._add("negated branch", node.test, "(not ({}))".format(self._text(node.test)))
        self.generic_visit(node)

    visit_If = visit_IfExp = visit_While = _visit_branch

    def visit_comprehension(self, node):
        for test in node.ifs:
            self._add("negated branch", test, "(not ({}))".format(self._text(test)))
        self.generic_visit(node)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Constant):
            return
        if not isinstance(node.value, (ast.Yield, ast.YieldFrom)):
            self._add("deleted statement", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node):
        if any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self._add("deleted statement", node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node):
        self._add("deleted statement", node, "pass")
        self.visit(node.value)

    def visit_Return(self, node):
        if node.value is not None:
            self.visit(node.value)

    def visit_With(self, node):
        for item in node.items:
            if item.optional_vars is None and "name_scope" not in self._text(item.context_expr):
                self._add("dropped context", item.context_expr, '__import__("contextlib").nullcontext()')
        self.generic_visit(node)

    def visit_Call(self, node):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if isinstance(node.func, ast.Attribute) and name in FUNCTIONS:
            self._add("comparison", node.func, self._text(node.func)[: -len(name)] + FUNCTIONS[name])
        one, other = (node.args + [None, None])[:2]
        is_plain = other is not None and not any(isinstance(arg, ast.Starred) for arg in (one, other))
        if is_plain and name not in SYMMETRIC + ASKED:
            span = self._span(one)[0], self._span(other)[1]
            between = self._bytes[self._span(one)[1] : self._span(other)[0]].decode("utf-8")
            self._add("swapped arguments", node, self._text(other) + between + self._text(one), span)
        self.generic_visit(node)


def mutants_of(path, root=ROOT):
    with open(os.path.join(root, path), encoding="utf-8") as file:
        text = file.read()
    return Source(path, text).mutants


def key_of(mutant, mutants):
    """Name a mutant by what does not move when other functions change."""
    alike = [one for one in mutants if (one.function, one.operator) == (mutant.function, mutant.operator)]
    return f"{mutant.path} {mutant.function} {mutant.operator} {alike.index(mutant)}"


def drawn(seed):
    """Return [(key, Mutant)] of all parts, in the order in which they are taken."""
    queues = []
    for part in PARTS:
        drawn_mutants = []
        for path in sorted(glob.glob(os.path.join(ROOT, part, "**", "*.py"), recursive=True)):
            mutants = mutants_of(os.path.relpath(path, ROOT).replace(os.sep, "/"))
            drawn_mutants += [(key_of(mutant, mutants), mutant) for mutant in mutants]
        random.Random(seed).shuffle(drawn_mutants)
        queues.append(drawn_mutants)
    ordered = []
    while any(queues):
        ordered += [queue.pop() for queue in queues if queue]
    return ordered


# ----------------------------------------------------------------------------------------------------------------------
# Which tests reach which lines


def copy_sources(folder):
    for name in ("accum", "compat", "docs", "tests"):
        target = os.path.join(folder, name)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(os.path.join(ROOT, name), target, symlinks=True)
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(os.path.join(ROOT, name), folder)


def quick_tests():
    paths = sorted(glob.glob(os.path.join(ROOT, "tests", "[gkr]*", "test_*.py")))
    return [os.path.relpath(path, ROOT) for path in paths]


class Watch:
    """A plugin of pytest: tells coverage which test runs, and takes its time and outcome."""

    def __init__(self, cover=None):
        self._cover, self.seconds, self.failed = cover, {}, None

    def pytest_runtest_logstart(self, nodeid):
        if self._cover is not None:
            self._cover.switch_context(nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = self.failed or report.nodeid
        elif report.passed:
            self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed or report.skipped:
            self.seconds.setdefault(report.nodeid, 0.0)
            self.seconds[report.nodeid] += 1e9

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed = self.failed or report.nodeid or "collection"


def make_map(arguments):
    """Run the tests under coverage, and write {"seconds": {test: s}, "lines": {file: {line: [tests]}}}."""
    folder = os.path.abspath(arguments.folder)
    os.makedirs(folder, exist_ok=True)
    copy_sources(folder)
    enter(folder)
    import coverage
    import pytest

    sources = [os.path.join(folder, name) for name in ("accum", "compat")]
    name = "coverage-added" if arguments.add else "coverage"
    cover = coverage.Coverage(data_file=os.path.join(folder, name), branch=True, source=sources)
    cover.start()
    watch = Watch(cover)
    pytest.main(["-q", "-p", "no:cacheprovider", "-m", arguments.marks] + (arguments.tests or quick_tests()), [watch])
    cover.stop()
    cover.save()
    data = cover.get_data()
    # Those named by an address have another name in each process.
    passed = sorted(test for test, seconds in watch.seconds.items() if seconds < 1e6 and " at 0x" not in test)
    index_of_test = {test: index for index, test in enumerate(passed)}
    lines = {}
    for path in data.measured_files():
        reached_from = {}
        for line, tests in data.contexts_by_lineno(path).items():
            reached = sorted(index_of_test[test] for test in tests if test in index_of_test)
            if reached:
                reached_from[str(line)] = reached
        lines[os.path.relpath(os.path.realpath(path), os.path.realpath(folder))] = reached_from
    coverage = {"tests": passed, "seconds": [watch.seconds[test] for test in passed], "lines": lines}
    if arguments.add:
        with open(os.path.join(folder, "map.json"), encoding="utf-8") as file:
            coverage = together(json.load(file), coverage)
    with open(os.path.join(folder, "map.json"), "w", encoding="utf-8") as file:
        json.dump(coverage, file)
    return 0


def together(one, other):
    """Join two maps, which have no test in common."""
    shift, lines = len(one["tests"]), {path: dict(reached) for path, reached in one["lines"].items()}
    for path, reached in other["lines"].items():
        for line, tests in reached.items():
            before = lines.setdefault(path, {}).get(line, [])
            lines[path][line] = before + [index + shift for index in tests]
    return {"tests": one["tests"] + other["tests"], "seconds": one["seconds"] + other["seconds"], "lines": lines}


def enter(folder):
    """Let imports come from the copy, and leave nothing compiled of a changed file behind."""
    os.chdir(folder)
    sys.dont_write_bytecode = True
    sys.path[:1] = [folder]  # in place of this script's folder, where numbers.py would hide Python's own
    os.environ["PYTHONPATH"] = folder
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def tests_for(mutant, coverage):
    """Return (tests, the seconds that they take): those that reach the line, then those that reach its file.

    What a cache keeps is reached by the first test alone. The quickest of each file come first, and each function
    before its other parameters.
    """
    lines = coverage["lines"].get(mutant.path, {})
    reached = set(lines.get(str(mutant.line), []))
    around = {index for indices in lines.values() for index in indices} - reached
    chosen, total = [], 0.0
    for test, seconds in _varied(reached, coverage) + (_varied(around, coverage) if reached else []):
        if chosen and (total + seconds > SECONDS or len(chosen) == TESTS):
            break
        chosen.append(test)
        total += seconds
    return chosen, total


def _varied(indices, coverage):
    """Return [(test, seconds)], the first of them from as many functions and files as there are, and quick."""
    rounds, ordered = {}, []
    for index in sorted(indices, key=lambda index: coverage["seconds"][index]):
        test = coverage["tests"][index]
        function = test.split("[")[0]
        rounds[function] = rounds.get(function, 0) + 1
        file = rounds[function], test.split("::")[0]
        rounds[file] = rounds.get(file, 0) + 1
        ordered.append((rounds[function], rounds[file], coverage["seconds"][index], test))
    return [(test, seconds) for _, _, seconds, test in sorted(ordered)]


# ----------------------------------------------------------------------------------------------------------------------
# Running them


def run(arguments):
    folder = os.path.abspath(arguments.folder)
    coverage = {"tests": [], "seconds": [], "lines": {}}
    if not arguments.tests:
        with open(os.path.join(folder, "map.json"), encoding="utf-8") as file:
            coverage = json.load(file)
    copy_sources(folder)
    subprocess.call([sys.executable, "-m", "compileall", "-q", "accum", "compat", "tests"], cwd=folder)
    commit = subprocess.check_output(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT).decode().strip()
    enter(folder)
    import pytest  # noqa: F401  so that each mutant's process has it
    import tensorflow as tf

    tf.keras.layers.Dense  # noqa: B018  Keras is imported on first use
    passes = {}  # by a test that has caught a mutant: whether it passes without one
    left = arguments.count
    mutants = drawn(arguments.seed)
    drop_what_is_gone(mutants)
    for key, mutant in mutants:
        before = read_record().get(key)
        is_wanted = before is not None and before["outcome"] != "killed" if arguments.survivors else before is None
        if not is_wanted or (arguments.only and not any(text in key for text in arguments.only)):
            continue
        if left == 0:
            break
        left -= 1
        tests, estimate = (arguments.tests, 3 * SECONDS) if arguments.tests else tests_for(mutant, coverage)
        outcome, test, seconds = tried(mutant, tests, estimate, folder, arguments.marks)
        if test not in passes and outcome == "killed" and "::" in (test or ""):
            passes[test] = in_child([test], folder, arguments.marks, 600)[0] == "survived"
        if not passes.get(test, True):
            raise RuntimeError(f"{test} fails without a mutant.")
        print("{:>8} {:>4.0f} s  {}  ({})".format(outcome, seconds, key, test), flush=True)
        if arguments.survivors and outcome != "killed" and (not tests or before["outcome"] != "not reached"):
            continue
        text, changed = change_of(mutant, folder)
        records = read_record()  # anew, because another run may have written meanwhile
        records[key] = {
            "outcome": outcome,
            "test": test,
            "tests": len(tests),
            "line": mutant.line,
            "before": text,
            "after": changed,
            "commit": commit,
            "tensorflow": tf.__version__,
            "seed": arguments.seed,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        }
        write_record(records)
    return 0


def change_of(mutant, root=ROOT):
    """Return the mutant's line in the sources, and what it becomes."""
    with open(os.path.join(root, mutant.path), "rb") as file:
        source = file.read()
    start = source.rfind(b"\n", 0, mutant.start) + 1
    changed = source[start : mutant.start] + mutant.text.strip("\n").encode("utf-8")
    changed += source[mutant.end :].split(b"\n")[0]
    before = source.splitlines()[mutant.line - 1].decode("utf-8").strip()
    return before, changed.decode("utf-8").strip().split("\n")[0]


def drop_what_is_gone(mutants):
    """Drop records of mutants that the sources no longer have, or have elsewhere in the same function."""
    mutants, records = dict(mutants), read_record()
    gone = [
        key
        for key, record in records.items()
        if key not in mutants or change_of(mutants[key]) != (record["before"], record["after"])
    ]
    for key in gone:
        del records[key]
    if gone:
        print(f"{len(gone)} records dropped, of mutants that the sources no longer have", flush=True)
        write_record(records)


def tried(mutant, tests, estimate, folder, marks):
    """Return ("killed", "survived", "timed out" or "not reached", the test that failed or None, seconds)."""
    if not tests:
        return "not reached", None, 0.0
    path = os.path.join(folder, mutant.path)
    with open(path, "rb") as file:
        text = file.read()
    times = os.stat(path).st_atime, os.stat(path).st_mtime  # by which Python knows whether it has compiled a file
    with open(path, "wb") as file:
        file.write(text[: mutant.start] + mutant.text.encode("utf-8") + text[mutant.end :])
    begin = time.time()
    try:
        outcome, test = in_child(tests, folder, marks, 40 + 4 * estimate)
    finally:
        with open(path, "wb") as file:
            file.write(text)
        os.utime(path, times)
    return outcome, test, time.time() - begin


def in_child(tests, folder, marks, limit):
    """Run tests in a forked process. Returns (outcome, the test that failed or None)."""
    answer = os.path.join(folder, "answer.json")
    if os.path.exists(answer):
        os.remove(answer)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        output = os.open(os.path.join(folder, "output.txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import pytest

        watch = Watch()
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", marks] + tests, [watch])
        with open(answer, "w") as file:
            json.dump([int(code), watch.failed], file)
        sys.stdout.flush()
        os._exit(0)
    deadline = time.time() + limit
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.time() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "timed out", None
        time.sleep(0.05)
    if not os.path.exists(answer):
        return "killed", "the process crashed"
    with open(answer) as file:
        code, failed = json.load(file)
    if code == 5:  # `marks` leaves out all of them
        return "not reached", None
    if code != 0 and failed is None:
        raise RuntimeError(f"pytest ended with {code}, and no test failed: see output.txt in {folder}.")
    return ("survived", None) if code == 0 else ("killed", failed)


# ----------------------------------------------------------------------------------------------------------------------
# The record and the page


def read_record():
    if not os.path.exists(RECORD):
        return {}
    with open(RECORD, encoding="utf-8") as file:
        return json.load(file)


def write_record(records):
    lines = [f" {json.dumps(key)}: {json.dumps(records[key], ensure_ascii=False)}" for key in sorted(records)]
    with open(RECORD + ".new", "w", encoding="utf-8", newline="\n") as file:
        file.write("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(RECORD + ".new", RECORD)  # at once, because another run may read it


def section(records):
    """The table and the list of survivors, in Markdown."""
    outcomes = ("killed", "timed out", "survived", "not reached")
    rows = []
    for part in PARTS:
        outcomes_here = [record["outcome"] for key, record in records.items() if key.startswith(part + "/")]
        rows.append([f"`{part}`", len(outcomes_here)] + [outcomes_here.count(outcome) for outcome in outcomes])
    rows.append(["together"] + [sum(row[index] for row in rows) for index in range(1, 6)])
    dates = sorted({record["date"] for record in records.values()})
    versions = sorted({record["tensorflow"] for record in records.values()})
    text = f"\nRun {' to '.join(sorted({dates[0], dates[-1]}))} on TensorFlow {' and '.join(versions)}.\n\n"
    text += "| sources | mutants | caught | out of time | survived | no quick test runs the line |\n"
    text += "|---|---:|---:|---:|---:|---:|\n"
    text += "".join("| " + " | ".join(map(str, row)) + " |\n" for row in rows)
    left = [(key, record) for key, record in sorted(records.items()) if record["outcome"] in ("survived", "timed out")]
    if left:
        text += "\n| what no test caught | became | why |\n|---|---|---|\n"
    for key, record in left:
        path, function = key.split(" ")[:2]
        why = record.get("why", "not explained yet")
        text += f"| `{path}`, `{function}`: {_code(record['before'])} | {_code(record['after'])} | {why} |\n"
    return text + "\n"


def _code(text):
    return "`` {} ``".format(text.replace("|", "\\|"))


def page():
    with open(PAGE, encoding="utf-8") as file:
        text = file.read()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    with open(PAGE, "w", encoding="utf-8", newline="\n") as file:
        file.write(text[:begin] + section(read_record()) + text[end:])
    return 0


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", metavar="map | run | page")
    maps = commands.add_parser("map", help="find which tests run which lines")
    runs = commands.add_parser("run", help="plant mutants; writes records/generated-mutants.json")
    for command in (maps, runs):
        command.add_argument("folder", metavar="FOLDER", help="for the copy of the sources and the map")
        command.add_argument("--tests", nargs="+", default=[], help="these, in place of those that the map names")
        command.add_argument("--marks", default="not slow", help="as pytest's -m")
    maps.add_argument("--add", action="store_true", help="to the map in FOLDER, of other tests")
    runs.add_argument("--count", type=int, default=-1, help="how many mutants (default: all that are left)")
    runs.add_argument("--seed", type=int, default=0, help="of the order in which mutants are taken")
    runs.add_argument("--survivors", action="store_true", help="only those that no test has caught before")
    runs.add_argument("--only", nargs="+", metavar="TEXT", help="only those whose name has a TEXT in it")
    commands.add_parser("page", help="write pages/generated-mutants.md")
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 2
    if arguments.command == "page":
        return page()
    return (make_map if arguments.command == "map" else run)(arguments)


if __name__ == "__main__":
    sys.exit(main())
