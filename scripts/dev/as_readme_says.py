"""Install and test as the README says: `python scripts/dev/as_readme_says.py FOLDER`. Run by `tox run -e readme`.

The README's line that ends in `pytest` runs in a copy of the checkout, which builds beside other environments of tox
can't disturb, and in an environment that is empty but for pip. FOLDER is made anew.
"""

import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LEFT_OUT = (".tox", ".venv", "build", "dist", "*.egg-info", "__pycache__")


def command(text):
    """The line of the README that installs what the tests need and runs them, without its comment."""
    (command,) = re.findall(r"(?m)^(python -m pip install .* && pytest)\s+#", text)
    return command


def main():
    folder = os.path.abspath(sys.argv[1])
    checkout, environment = os.path.join(folder, "checkout"), os.path.join(folder, "environment")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean["PATH"] = os.path.join(environment, "Scripts" if os.name == "nt" else "bin") + os.pathsep + clean["PATH"]
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        said = command(file.read())
    print("$", said, flush=True)
    sys.exit(subprocess.call(said, shell=True, cwd=checkout, env=clean))


if __name__ == "__main__":
    main()
