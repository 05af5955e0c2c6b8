"""List the environments of the matrix that exist on each platform, and write these lists into the workflow.

tox.ini defines the environments; this file only knows for which environments TensorFlow is published on a platform.
`wheels.py` checks that against the package index.

    python scripts/dev/environments.py windows     prints the environments of a platform
    python scripts/dev/environments.py --write     writes all lists into .github/workflows/platforms.yml
"""

import argparse
import configparser
import itertools
import os
import re
import textwrap
from typing import Dict, List

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WORKFLOW = os.path.join(ROOT, ".github", "workflows", "platforms.yml")
ENV_NAME = re.compile(r"py3(\d+)-tf(\d+)\.(\d+)(?:-(\w+))?$")
LABELS = ["v1", "", "beyond", "metal"]


def expanded(text: str) -> List[str]:
    """The names that a tox.ini expression with commas and braces expands to."""
    names = []
    for part in re.split(r",(?![^{]*})", text.replace("\\\n", "").replace("\n", ",")):
        pieces = [piece.split(",") for piece in re.split(r"[{}]", part.strip())]
        names += ["".join(choice) for choice in itertools.product(*pieces)]
    return [name for name in names if name]


def labels(path: str = os.path.join(ROOT, "tox.ini")) -> Dict[str, List[str]]:
    """The environments under each label of tox.ini, and under "" those of `env_list`."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(path, encoding="utf-8")
    text = re.sub(r"(?m)^#.*\n", "", config["tox"]["labels"].replace("\\\n", ""))
    lines = [line.split("=", 1) for line in text.strip().splitlines()]
    names_of_label = {name.strip(): expanded(value) for name, value in lines}
    names_of_label[""] = expanded(config["tox"]["env_list"])
    return names_of_label


def parts(env_name: str):
    """The sort key of an environment: (TensorFlow version, minor of Python 3, last factor or "")."""
    minor, major, tf_minor, flavour = ENV_NAME.match(env_name).groups()
    return (int(major), int(tf_minor)), int(minor), flavour or ""


def on_linux(tf, python, flavour):
    return flavour != "metal"


def on_linux_arm64(tf, python, flavour):
    return flavour != "metal" and tf >= (2, 10)


def on_windows(tf, python, flavour):
    return flavour != "metal"


def on_macos_intel(tf, python, flavour):
    return flavour != "metal" and tf <= (2, 16)


def on_macos_arm(tf, python, flavour):
    return flavour != "metal" and _is_built_for_arm(tf, python)


def on_metal(tf, python, flavour):
    return flavour == "metal" and _is_built_for_arm(tf, python)


def _is_built_for_arm(tf, python):
    first = {(2, tf_minor): 8 for tf_minor in range(5, 14)}
    last = {(2, tf_minor): 9 for tf_minor in range(5, 9)}
    return tf >= (2, 5) and first.get(tf, 9) <= python <= last.get(tf, 13)


PLATFORMS = {
    "linux": on_linux,
    "linux-arm64": on_linux_arm64,
    "windows": on_windows,
    "macos-intel": on_macos_intel,
    "macos-arm": on_macos_arm,
    "metal": on_metal,
}


def env_names(platform: str) -> List[str]:
    """The environments that exist on a platform, by TensorFlow version and Python."""
    names_of_label = labels()
    candidates = {env_name for label in LABELS for env_name in names_of_label[label]}
    return sorted((env_name for env_name in candidates if PLATFORMS[platform](*parts(env_name))), key=parts)


def flow_list(platform: str, indent: int = 10) -> str:
    """The environments as a list of YAML, wrapped."""
    text = ", ".join(env_names(platform))
    margin = " " * indent
    return "[\n{}\n{}]".format(textwrap.fill(text, 118, initial_indent=margin, subsequent_indent=margin), margin[:-2])


def with_lists(text: str) -> str:
    """The text of the workflow with its lists of environments written anew."""
    for platform in PLATFORMS:
        pattern = r"(?s)(\n  {}:\n.*?\n        environment: )\[.*?\]".format(re.escape(platform))
        match = re.search(pattern, text)
        if match is None:
            raise ValueError(f"the workflow has no job {platform} with a list of environments")
        text = text[: match.start()] + match.group(1) + flow_list(platform) + text[match.end() :]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platform", nargs="?", choices=PLATFORMS)
    parser.add_argument("--write", action="store_true", help="write the lists into the workflow")
    arguments = parser.parse_args()
    if arguments.platform:
        print("\n".join(env_names(arguments.platform)))
    if arguments.write:
        with open(WORKFLOW, encoding="utf-8") as file:
            text = with_lists(file.read())
        with open(WORKFLOW, "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
