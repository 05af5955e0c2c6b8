"""Run both commands of the README: `python project/as_readme_says.py FOLDER REPORT`, which `tox run -e readme` does.

They run in a copy of the checkout, which builds beside other environments of tox can't disturb, and in an environment
that is empty but for pip. FOLDER is made anew, and the tests leave a JUnit file REPORT.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LEFT_OUT = (".tox", ".venv", "build", "dist", "*.egg-info", "__pycache__")


def commands(text):
    """The lines of the README that install accum and try it, without their comments."""
    return re.findall(r"(?m)^(python -m pip install .* && .*?)\s+#", text)


def main():
    folder, report = map(os.path.abspath, sys.argv[1:])
    checkout, environment = os.path.join(folder, "checkout"), os.path.join(folder, "environment")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean["PATH"] = os.path.join(environment, "Scripts" if os.name == "nt" else "bin") + os.pathsep + clean["PATH"]
    clean["PYTEST_ADDOPTS"] = shlex.quote("--junitxml=" + report)
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        demo, tests = commands(file.read())
    for command in (demo, tests):
        print("$", command, flush=True)
        if subprocess.call(command, shell=True, cwd=checkout, env=clean):
            sys.exit(f"This command of the README failed: {command}")


if __name__ == "__main__":
    main()
