"""`python -m accum migrate` and files: which it looks at, what it keeps of them, and when it writes nothing."""

import ast
import glob
import importlib.util
import os
import re
import stat
import subprocess
import sys

import pytest
from versions import IS_WINE

import accum
from accum.__main__ import main

pytestmark = pytest.mark.slow

HAS_LIBCST = importlib.util.find_spec("libcst") is not None
needs_libcst = pytest.mark.skipif(not HAS_LIBCST, reason="`migrate` is an extra, tested where tox.ini installs LibCST")

BEFORE = b'from gradient_accumulator import GradientAccumulateOptimizer\nmake = GradientAccumulateOptimizer("sgd", 4)\n'
AFTER = b'import accum\nmake = accum.GradientAccumulateOptimizer("sgd", 4)\n'
FILES = sorted(glob.glob(os.path.join(os.path.dirname(accum.__file__), "_migrate", "**", "*.py"), recursive=True))
FILES.append(os.path.join(os.path.dirname(accum.__file__), "_cli", "migrate.py"))
PYTHON_2 = b'import gradient_accumulator\nprint "two"\n'


@pytest.fixture
def their(tmp_path):
    """A function that makes a file: `their("a/b.py")`, of what there is to rewrite or of another content."""

    def make(name, content=BEFORE):
        path = tmp_path.joinpath(*name.split("/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    return make


def migrate(*arguments):
    return main(["migrate"] + [str(argument) for argument in arguments])


@needs_libcst
def test_without_write_there_is_a_diff_and_nothing_else(their, capsys):
    path = their("a.py")
    before = os.stat(str(path))
    assert migrate(path) == 0
    after = os.stat(str(path))
    assert path.read_bytes() == BEFORE and (after.st_ino, after.st_mtime) == (before.st_ino, before.st_mtime)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"--- {path}", f"+++ {path}"]
    assert [line for line in lines[3:] if line[0] == "+"] == ["+" + line for line in AFTER.decode().splitlines()]


KEPT = {
    "crlf": (BEFORE.replace(b"\n", b"\r\n"), AFTER.replace(b"\n", b"\r\n")),
    "mixed": (b"a = 1\r\nb = 2\n" + BEFORE + b"c = '\x0c'\r\n", b"a = 1\r\nb = 2\n" + AFTER + b"c = '\x0c'\r\n"),
    "bom": (b"\xef\xbb\xbf" + BEFORE, b"\xef\xbb\xbf" + AFTER),
    "latin-1": (b"# coding: latin-1\n'\xe9'\n" + BEFORE, b"# coding: latin-1\n'\xe9'\n" + AFTER),
    "utf-8": ("'\u4e2d\u2028'\n".encode() + BEFORE, "'\u4e2d\u2028'\n".encode() + AFTER),
    "tabs-and-no-last-line-end": (
        BEFORE + b"if 1:\n\tx = [1 ,2]  ;y=3 # \t",
        AFTER + b"if 1:\n\tx = [1 ,2]  ;y=3 # \t",
    ),
}


@needs_libcst
@pytest.mark.parametrize("name", sorted(KEPT))
def test_every_other_byte_stays(their, name, capsys):
    before, after = KEPT[name]
    path = their("a.py", before)
    assert migrate("--write", path) == 0
    assert path.read_bytes() == after


@needs_libcst
def test_folders_are_searched_but_for_what_is_hidden_installed_or_linked(their, tmp_path, capsys):
    written = [their("a.py"), their("package/deep/b.py")]
    left = [
        their(name) for name in (".tox/c.py", "env/lib/c.py", "site-packages/c.py", ".c.py", "c.txt", "package/c.pyi")
    ]
    their("env/pyvenv.cfg", b"")
    elsewhere = their("../elsewhere/d.py")
    os.symlink(str(elsewhere), str(tmp_path / "linked.py"))
    os.symlink(str(elsewhere.parent), str(tmp_path / "linked"))
    assert migrate("--write", tmp_path, written[0]) == 0
    assert [path.read_bytes() for path in written] == [AFTER] * 2
    assert {path.read_bytes() for path in left + [elsewhere]} == {BEFORE}


@pytest.mark.skipif(IS_WINE, reason="Wine says that it made a symbolic link, and makes none")
@needs_libcst
def test_permissions_stay_and_a_link_stays_a_link(their, tmp_path, capsys):
    path = their("tool.py")
    os.chmod(str(path), 0o751)
    mode = stat.S_IMODE(os.stat(str(path)).st_mode)
    assert mode == (0o751 if os.name == "posix" else 0o666)  # Windows only knows read-only files
    link = tmp_path / "link"
    os.symlink("tool.py", str(link))
    assert migrate("--write", link) == 0
    assert os.path.islink(str(link)) and path.read_bytes() == AFTER
    assert stat.S_IMODE(os.stat(str(path)).st_mode) == mode
    assert sorted(os.listdir(str(tmp_path))) == ["link", "tool.py"]


@needs_libcst
def test_a_file_with_nothing_to_change_is_not_touched(their, capsys):
    paths = [their("a.py", AFTER), their("b.py", b"import gradient_accumulator\n"), their("c.py", b"print 'two'\n")]
    for path in paths:
        os.utime(str(path), (1, 1))
    assert migrate("--write", *paths) == 0
    assert [os.stat(str(path)).st_mtime for path in paths] == [1] * 3


UNREADABLE = {
    "Python 2": (PYTHON_2, "cannot be parsed as Python 3: line 2"),
    "bytes": (b"\n\n\n# gradient_accumulator \xff\n", "can't decode"),
    "cookie": (b"# coding: klingon\nimport gradient_accumulator\n", "klingon"),
    "no-text": (b"# coding: rot13\nimport gradient_accumulator\n", "rot13"),
    "not-the-same-again": (b"# coding: utf-7\nimport gradient_accumulator # +AGEAYgBj-\n", "would change its bytes"),
    "deep": (b"import gradient_accumulator\nx = 1" + b" + 1" * 1000 + b"\n", "nested too deeply"),
    "zero": (b"import gradient_accumulator\n\0\n", "cannot be parsed as Python 3"),
}


@needs_libcst
@pytest.mark.parametrize("name", sorted(UNREADABLE))
def test_one_unreadable_file_and_nothing_is_written(their, name, tmp_path, capsys):
    content, words = UNREADABLE[name]
    good, bad = their("a.py"), their("b.py", content)
    assert migrate("--write", tmp_path) == 2
    assert (good.read_bytes(), bad.read_bytes()) == (BEFORE, content)
    said = capsys.readouterr()
    assert said.out == "" and f"{bad}: " in said.err and words in said.err


@needs_libcst
def test_a_path_that_is_not_there_is_named(their, tmp_path, capsys):
    path = their("a.py")
    assert migrate("--write", path, tmp_path / "b.py") == 2
    assert path.read_bytes() == BEFORE
    assert "b.py: no such file or folder" in capsys.readouterr().err


TENSORPACK = b"from tensorpack.tfutils.optimizer import AccumGradOptimizer\nAccumGradOptimizer(o, 4)\n"


@needs_libcst
@pytest.mark.parametrize(
    "trainer", ["SyncMultiGPUTrainerReplicated", "AsyncMultiGPUTrainer", "DistributedTrainerReplicated"]
)
def test_a_trainer_of_another_file_that_calls_one_optimizer_per_gpu_is_named_and_nothing_rewritten(
    their, trainer, tmp_path, capsys
):
    optimizer, train = their("a.py", TENSORPACK), their("train.py", f"fit(t, {trainer}(8))\n".encode())
    assert migrate("--write", tmp_path) == 1
    assert optimizer.read_bytes() == TENSORPACK
    assert f"a.py:2: left as it is: `AccumGradOptimizer`: `{trainer}` ({train})" in capsys.readouterr().err


@needs_libcst
def test_a_trainer_that_calls_its_optimizer_once_is_no_obstacle(their, tmp_path, capsys):
    optimizer = their("a.py", TENSORPACK)
    their("train.py", b"fit(t, SyncMultiGPUTrainerParameterServer(8)) or MySyncMultiGPUTrainerReplicated\n")
    assert migrate("--write", tmp_path) == 0
    assert b"AccumGradOptimizer" not in optimizer.read_bytes()


BY_HAND = b"import tensorflow  # accumulated gradients\n"


@needs_libcst
def test_a_file_of_python_2_that_names_no_library_stops_nothing(their, capsys):
    good, bad = their("a.py"), their("b.py", BY_HAND + b'print "two"\n')
    assert migrate("--write", good, bad) == 1
    assert good.read_bytes() == AFTER
    said = capsys.readouterr().err
    assert (
        "b.py: cannot be parsed as Python 3: line 2" in said and "It may accumulate by hand; check it yourself" in said
    )


SUMS = b"""
import tensorflow as tf
class Sums:
    def __init__(self, grads):
        self.grad_sums = [tf.Variable(tf.zeros_like(grad)) for grad in grads]

    def add(self, grads):
        for held, grad in zip(self.grad_sums, grads):
            held.assign_add(grad)
"""
USES = {
    "by-name": b"from tools.sums import Sums as Held\nheld = Held([])\n",
    "by-module": b"from tools import sums\nheld = sums.Sums([])\n",
    "from-the-package": b"from tools import Sums\nheld = Sums([])\n",
    "relative": b"from .tools.sums import Sums\nheld = Sums([])\n",
}


@needs_libcst
@pytest.mark.parametrize("name", sorted(USES))
def test_what_accumulates_in_another_file_is_named_where_it_is_used(their, name, tmp_path, capsys):
    sums, _ = their("tools/sums.py", SUMS), their("train.py", USES[name])
    assert migrate(tmp_path) == 1
    said = capsys.readouterr().err
    assert "sums.py:9: left as it is: `grad_sums`: gradients are added up by hand" in said
    assert "train.py:2: left as it is: `" in said and f"it adds gradients up by hand, in {sums}. Migrate it" in said


@needs_libcst
def test_a_name_of_another_module_is_no_use(their, tmp_path, capsys):
    their("tools/sums.py", SUMS)
    their("train.py", b"from elsewhere import Sums\nheld = Sums([])\n")
    assert migrate(tmp_path) == 1
    assert "train.py" not in capsys.readouterr().err


@needs_libcst
@pytest.mark.parametrize("has_tape", [True, False])
def test_a_tape_in_another_file_decides_which_recipe_a_file_gets(their, has_tape, tmp_path, capsys):
    their("sums.py", SUMS)
    their("train.py", b"with tf.GradientTape() as tape:\n    pass\n" if has_tape else b"")
    assert migrate(tmp_path) == 1
    said = capsys.readouterr().err
    assert ("TensorFlow 2: a list of sums" in said) == has_tape
    assert ("TensorFlow 1: accumulate, apply, zero" in said) == (not has_tape)


@needs_libcst
def test_a_graph_gets_its_recipe_beside_a_tape_of_another_file(their, tmp_path, capsys):
    their("sums.py", SUMS + b"x = tf.placeholder(tf.float32)\n")
    their("train.py", b"with tf.GradientTape() as tape:\n    pass\n")
    assert migrate(tmp_path) == 1
    assert "TensorFlow 1: accumulate, apply, zero" in capsys.readouterr().err


FED = "x = tf.placeholder(tf.float32)\ny = tf.placeholder(tf.float32)\n"
SPLIT = {
    "placeholders": (FED + "grads = opt.compute_gradients(cost)", "cost", "(x, y)"),
    "attributes": (
        "self.x = tf.placeholder(tf.float32, [None, 3])\ngrads = opt.compute_gradients(loss=self.loss)",
        "self.loss",
        "self.x",
    ),
    "rates": (
        FED + "keep_prob = tf.placeholder(tf.float32)\ntraining = tf.placeholder(tf.bool, [])\ntf.gradients(cost, vs)",
        "cost",
        "(x, y)",
    ),
    "an iterator": (
        "images, labels = data.make_one_shot_iterator().get_next()\ntf.gradients([cost], vs)\nopt.minimize(cost)",
        "cost",
        "(images, labels)",
    ),
    "a model_fn": (
        "def model_fn(features, labels, mode):\n    return create_optimizer(total_loss, 1e-4, 100, 10, False)",
        "total_loss",
        "(features, labels)",
    ),
    "two losses": (
        FED + "opt.minimize(loss_d, var_list=ds)\nopt.minimize(loss_g, var_list=gs)",
        "(loss_d, loss_g)",
        "(x, y)",
    ),
    "slim": (FED + "train_op = slim.learning.create_train_op(total, opt)", "total", "(x, y)"),
    "neither": ("opt.minimize(cost + penalty)", "loss", "inputs"),
}


@needs_libcst
@pytest.mark.parametrize("graph,loss,batch", [pytest.param(*case, id=name) for name, case in SPLIT.items()])
def test_a_graph_gets_the_line_that_splits_its_batch(graph, loss, batch, their, tmp_path, capsys):
    their("sums.py", SUMS + graph.encode() + b"\n")
    assert migrate(tmp_path) == 1
    assert f"`{loss} = accum.compat.v1.split_batch({loss}, {batch}, micro_batch_size)`" in capsys.readouterr().err


SPOKEN = [
    "# accumulate the gradients of several batches",
    "flags.DEFINE_integer('iter_size', 1, '')",
    "gradient_accumulator = find()",
    "options = dict(accum_steps=4)",
    "num_accum = 4",
]
NOT_SPOKEN = {
    "Adagrad": "import tensorflow as tf\ninitial_accumulator_value = 0.1  # AdaGrad accumulators\n",
    "replicas": "import tensorflow as tf\n# the gradient accumulators of all replicas\n",
    "PyTorch": "import tensorflow as tf\nimport torch\naccum_grads = 4\n",
    "ours": "import tensorflow as tf\nimport accum\naccum_steps = 4\n",
    "no TensorFlow": "accum_steps = 4\n",
    "Keras' argument": "import tensorflow as tf\nprint(gradient_accumulation_steps)\n",
}


@needs_libcst
@pytest.mark.parametrize("line", SPOKEN)
def test_a_file_that_speaks_of_accumulation_is_named(their, line, capsys):
    assert migrate(their("a.py", f"import tensorflow as tf\n\n{line}\n".encode())) == 1
    assert "a.py:3: left as it is: `" in capsys.readouterr().err


@needs_libcst
@pytest.mark.parametrize("name", sorted(NOT_SPOKEN))
def test_a_file_that_speaks_of_something_else_is_clean(their, name, capsys):
    assert migrate(their("a.py", NOT_SPOKEN[name].encode())) == 0
    assert "0 accumulate" in capsys.readouterr().err


@needs_libcst
def test_a_file_of_python_2_that_speaks_of_nothing_is_clean(their, capsys):
    assert migrate(their("a.py", b"import tensorflow as tf\nprint 'two'\nopt.apply_gradients(zip(grads, vs))\n")) == 0
    assert "0 accumulate" in capsys.readouterr().err


SUMMARIES = {
    "nothing": (["x.txt"], [], "1 file looked at, 0 accumulate."),
    "dry": (["a.py", "b.py"], [], "3 files looked at, 2 accumulate: 1 to be rewritten by --write, 1 left to you."),
    "written": (["a.py", "b.py"], ["--write"], "3 files looked at, 2 accumulate: 1 rewritten, 1 left to you."),
    "in part": (
        ["a.py", "c.py"],
        [],
        "3 files looked at, 2 accumulate: 1 to be rewritten by --write, 1 to be rewritten in part, 0 left to you.",
    ),
    "in part, written": (
        ["c.py"],
        ["--write"],
        "2 files looked at, 1 accumulates: 0 rewritten, 1 in part, 0 left to you.",
    ),
    "unreadable": (
        ["a.py", "d.py"],
        [],
        "3 files looked at, 1 accumulates: 1 to be rewritten by --write, 0 left to you; 1 not valid Python 3.",
    ),
    "one": (["a.py"], ["--write"], "2 files looked at, 1 accumulates: 1 rewritten, 0 left to you."),
}


@needs_libcst
@pytest.mark.parametrize("name", sorted(SUMMARIES))
def test_the_last_line_counts_what_was_looked_at_rewritten_and_left(their, name, capsys):
    content = {"a.py": BEFORE, "b.py": BEFORE.replace(b'"sgd", 4', b'"sgd"')}
    content["c.py"] = BEFORE + b'left = GradientAccumulateOptimizer("sgd")\n'
    content["d.py"] = b"import tensorflow as tf\nprint 'gradient accumulation'\n"
    names, options, line = SUMMARIES[name]
    paths = [their(name, content[name]) for name in names if name in content] + [their("x.txt", b"x = 1\n")]
    assert migrate(*options + paths) == int(len(set(names) - {"a.py", "x.txt"}) > 0)
    assert capsys.readouterr().err.splitlines()[-1] == line


REQUIRED = {
    "requirements.txt": (b"numpy\ngradient-accumulator==0.5.2  # ours\n", 2),
    "requirements/dev.txt": (b"-e .\nGradient_Accumulator\n", 2),
    "setup.py": (b"import setuptools\nsetup(install_requires=['gradient-accumulator>=0.4'])\n", 2),
    "pyproject.toml": (b'[project]\ndependencies = ["gradient-accumulator[tests]"]\n', 2),
    "environment.yml": (b"dependencies:\n  - pip:\n    - gradient-accumulator\n", 3),
}


@needs_libcst
@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_a_requirement_that_is_no_longer_needed_is_named(their, name, tmp_path, capsys):
    content, line = REQUIRED[name]
    their("a.py")
    path = their(name, content)
    migrate(tmp_path)
    said = capsys.readouterr().err
    assert f"{path}:{line}: note: gradient-accumulator is required here. When nothing imports it" in said


NOT_REQUIRED = {
    "requirements.txt": b"# gradient-accumulator\nmy-gradient-accumulator\ngradient-accumulator-tools\n",
    "setup.py": b"from gradient_accumulator import GradientAccumulateOptimizer\n",
    "own/setup.py": b"setup(\n    name='gradient-accumulator',\n    version=find('gradient_accumulator', 'v.py'),\n)\n",
    "own/pyproject.toml": b'[project]\nname = "gradient-accumulator"\n',
    "notes.txt": b"gradient-accumulator\n",
    ".venv/requirements.txt": b"gradient-accumulator\n",
}


@needs_libcst
@pytest.mark.parametrize("name", sorted(NOT_REQUIRED))
def test_what_only_looks_like_a_requirement_is_not_named(their, name, tmp_path, capsys):
    their(name, NOT_REQUIRED[name])
    migrate(tmp_path)
    assert "is required here" not in capsys.readouterr().err


def test_messages_lead_to_titles_that_the_guide_has():
    """An installed package has no docs/, so its messages name a page and a section of it."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with open(os.path.join(root, "docs", "migrating.md"), encoding="utf-8") as file:
        page = file.read()
    titles = re.findall(r"(?m)^###? (.+)$", page)
    for path in FILES:
        with open(path, encoding="utf-8") as file:
            code = file.read()
        assert "docs/" not in code, path
        assert [section for section in re.findall(r'guide\.see\("(.+?)"\)', code) if section not in titles] == []
    from accum._migrate.guide import PAGE

    assert page.startswith(f"# {PAGE}\n")


def fail(*arguments, **options):
    raise OSError(28, "No space left on device")


@needs_libcst
@pytest.mark.parametrize("broken", ["access", "replace", "fdopen"])
def test_a_file_that_can_t_be_replaced_is_as_it_was(their, broken, tmp_path, monkeypatch, capsys):
    path = their("a.py")
    monkeypatch.setattr(os, broken, (lambda path, mode: False) if broken == "access" else fail)
    assert migrate("--write", path) == 2
    assert path.read_bytes() == BEFORE and os.listdir(str(tmp_path)) == ["a.py"]
    said = capsys.readouterr()
    assert said.out == "" and "a.py: " in said.err


def from_the_second_on(function):
    """`function`, which fails when it is called again."""
    functions = iter([function])
    return lambda *arguments, **options: next(functions, fail)(*arguments, **options)


@needs_libcst
@pytest.mark.parametrize(
    "broken,first,words", [("fdopen", BEFORE, "nothing was written"), ("replace", AFTER, "already written: ")]
)
def test_of_two_files_none_is_half_written(their, broken, first, words, tmp_path, monkeypatch, capsys):
    """A full disk is met before the first file is replaced; what has been replaced is named, with what came of it."""
    paths = [their("a.py"), their("b.py")]
    monkeypatch.setattr(os, broken, from_the_second_on(getattr(os, broken)))
    assert migrate("--write", tmp_path) == 2
    assert [path.read_bytes() for path in paths] == [first, BEFORE]
    assert sorted(os.listdir(str(tmp_path))) == ["a.py", "b.py"]
    out, said = capsys.readouterr()
    assert "b.py: No space left on device" in said and words in said
    is_told = first == AFTER
    assert (f"+++ {paths[0]}" in out) == (f"{paths[0]}:2: note: " in said) == is_told
    assert str(paths[1]) not in out and f"{paths[1]}:2: " not in said


@needs_libcst
def test_a_read_only_file_is_named_and_nothing_is_written(their, capsys):
    paths = [their("a.py"), their("b.py")]
    os.chmod(str(paths[1]), 0o444)
    if os.access(str(paths[1]), os.W_OK):
        pytest.skip("this user may write everything")
    assert migrate("--write", *paths) == 2
    assert [path.read_bytes() for path in paths] == [BEFORE] * 2
    assert f"{paths[1]}: not writable" in capsys.readouterr().err


@needs_libcst
def test_a_file_that_another_process_holds_open_is_replaced_or_named(their, tmp_path, capsys):
    """Windows replaces no file that is open."""
    path = their("a.py")
    with open(str(path), "rb") as held:
        status = migrate("--write", path)
        assert held.read() == BEFORE
    assert (status, path.read_bytes()) == ((2, BEFORE) if os.name == "nt" else (0, AFTER))
    assert status == 0 or f"{path}: " in capsys.readouterr().err
    assert os.listdir(str(tmp_path)) == ["a.py"]


@needs_libcst
@pytest.mark.skipif(not hasattr(os, "chown"), reason="files have no owner that could be changed here")
@pytest.mark.parametrize("error", [PermissionError(1, "not permitted"), OSError(22, "no such owner in this container")])
def test_the_content_counts_more_than_the_owner(their, error, monkeypatch, capsys):
    paths, asked, stat_of = [their("a.py"), their("b.py")], [], os.stat

    def of_another(path, **options):
        result = stat_of(path, **options)
        is_theirs = str(path) in map(str, paths)
        return os.stat_result(result[:4] + (result[4] + 1, result[5] + 1) + result[6:]) if is_theirs else result

    def refuse(path, user, group):
        asked.append((user, group))
        raise error

    monkeypatch.setattr(os, "chown", refuse)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", of_another)
        assert migrate("--write", *paths) == 0
    assert [path.read_bytes() for path in paths] == [AFTER, AFTER]
    user, group = os.stat(str(paths[0])).st_uid + 1, os.stat(str(paths[0])).st_gid + 1
    assert asked == [(user, group), (-1, group)] * 2


@needs_libcst
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes among files here")
def test_a_pipe_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(str(tmp_path / "pipe"))
    assert migrate(tmp_path / "pipe") == 2
    assert "pipe: neither a file nor a folder" in capsys.readouterr().err


@needs_libcst
def test_a_reader_that_has_read_enough_stops_nothing(their):
    """`python -m accum migrate --write . | head`: all is written and said, and no traceback."""
    paths = [their("a.py"), their("b.py")]
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-W", "ignore", "-m", "accum", "migrate", "--write"] + [str(path) for path in paths]
    ran = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert ran.returncode == 0 and b"Error" not in ran.stderr
    assert all(f"{path}:2: note: ".encode() in ran.stderr for path in paths)
    assert [path.read_bytes() for path in paths] == [AFTER] * 2


def test_without_libcst_there_is_one_sentence_with_the_remedy(their, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert migrate("--write", their("a.py")) == 2
    assert "python -m pip install libcst" in capsys.readouterr().err


def test_no_path_at_all_is_a_wrong_argument(capsys):
    with pytest.raises(SystemExit) as caught:
        migrate()
    assert caught.value.code == 2


def imported(path):
    """Full names of the modules that a file imports, at its top or later."""
    with open(path, encoding="utf-8") as file:
        nodes = list(ast.walk(ast.parse(file.read())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return names + [node.module for node in nodes if isinstance(node, ast.ImportFrom)]


@pytest.mark.parametrize("path", FILES, ids=[os.path.basename(path) for path in FILES])
def test_nothing_of_it_imports_tensorflow(path):
    """So that it runs without TensorFlow. All other parts of accum import it, so those are not imported either."""
    for name in imported(path):
        assert name.split(".")[0] not in ("tensorflow", "keras", "numpy")
        assert name.split(".")[0] != "accum" or name.startswith("accum._migrate")
    if os.path.basename(path) in ("migrate.py", "files.py"):
        assert not any(name.startswith("libcst") for name in imported(path))
