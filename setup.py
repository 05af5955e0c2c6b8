"""Packaging of tf-accum. TensorFlow is an extra, not a requirement, so that users choose its version."""

import os
import re

from setuptools import find_packages, setup

HERE = os.path.dirname(os.path.abspath(__file__))


def read(*parts):
    with open(os.path.join(HERE, *parts), encoding="utf-8") as file:
        return file.read()


VERSION = re.search(r'__version__ = "(.+?)"', read("accum", "__init__.py")).group(1)


def repository():
    """The repository's address on the web, which a workflow on GitHub knows; None in any other build."""
    server, name = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    return f"{server}/{name}" if server and name else None


def for_an_index(text, address):
    """The README with absolute links, for readers who have no files beside it; without links if `address` is None."""
    text = re.sub(r"<!--.*?-->\n", "", text, flags=re.DOTALL)  # what only the tests read
    image = rf"![\1]({address}/raw/v{VERSION}/\2)" if address else ""
    text = re.sub(r"!\[([^]]*)\]\((?!https?:)([^)]*)\)", image, text)
    page = rf"[\1]({address}/blob/v{VERSION}/\2)" if address else r"\1"
    return re.sub(r"\[([^]]*)\]\((?!https?:)([^)]*)\)", page, text)


def pages(address):
    """The links that an index shows beside the README: {label: URL}."""
    paths = {"Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md", "Issues": "/issues"}
    return dict({label: address + path for label, path in paths.items()}, Source=address) if address else {}


ARM_MAC = "sys_platform == 'darwin' and platform_machine == 'arm64'"
NO_ARM_MAC = "(sys_platform != 'darwin' or platform_machine != 'arm64')"
TENSORFLOW = [
    # On Windows and Apple silicon, requirements of TF 2.13.1 have no wheel for Python 3.8.
    f"tensorflow==2.13.0; {ARM_MAC} and python_version == '3.8'",
    "tensorflow==2.13.0; sys_platform == 'win32' and python_version == '3.8'",
    f"tensorflow>=2.13,<2.22; {ARM_MAC} and python_version >= '3.9'",
    f"tensorflow>=2.2,<2.22; {NO_ARM_MAC} and (sys_platform != 'win32' or python_version != '3.8')",
    # The newest TensorFlow for Python 3.6 and 3.7 was built before protobuf 4.
    "protobuf<3.21; python_version < '3.8'",
]

setup(
    name="tf-accum",
    version=VERSION,
    description="Gradient accumulation for TensorFlow: train at a large batch size in the memory of a small one",
    long_description=for_an_index(read("README.md"), repository()),
    long_description_content_type="text/markdown",
    author="The accum developers",
    url=repository() or "",
    project_urls=pages(repository()),
    license="MIT",
    license_files=["LICENSE"],
    keywords="tensorflow keras gradient accumulation out of memory micro-batch large batch size static graph tf1 tf2",
    packages=find_packages(include=["accum", "accum.*"], exclude=["accum.compat*"])
    + ["accum._constraints", "accum.compat", "accum.compat.v1"],
    # `accum/compat` in the checkout is a link for editors; the wheel is built from this mapping, link or no link.
    # The wheel includes the pins, so that `python -m accum doctor` can name them.
    package_dir={"accum.compat": "compat", "accum._constraints": "constraints"},
    package_data={
        "accum": ["py.typed"],
        "accum._constraints": ["*.txt"],
        "accum._cli.demo": ["digits.npz", "*.txt"],
    },
    entry_points={"console_scripts": ["accum = accum.__main__:run"]},
    python_requires=">=3.6",
    install_requires=["numpy"],
    extras_require={
        "tf": TENSORFLOW,
        "plot": ["matplotlib>=3.3"],
        "migrate": ["libcst>=0.4.1"],
        "test": ["pytest", "tf-slim"],
    },
    zip_safe=False,
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.6",
        "Programming Language :: Python :: 3.7",
        "Programming Language :: Python :: 3.8",
        "Programming Language :: Python :: 3.9",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
