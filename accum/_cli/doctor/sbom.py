"""A software bill of materials: what is installed, or what a lock installs, with hashes, licenses and origins.

It is collected here from metadata and from the lock, without a network, and `cyclonedx` and `spdx` write it.
"""

import datetime
import os
import urllib.parse
import uuid
from typing import Any, Dict, List, NamedTuple, Optional

from accum._cli.doctor import licenses, locks


class Component(NamedTuple):
    """A package. `files` are those that the lock allows; none if the lock has another version of it, or none."""

    name: str
    version: str
    license: licenses.License
    files: List[locks.File]

    @property
    def purl(self):
        """The package URL, which says that the package is from the Python package index or a mirror of it."""
        return f"pkg:pypi/{self.name}@{urllib.parse.quote(self.version)}"

    def purl_of(self, file):
        """The package URL of one file of the package, with its hash."""
        return f"{self.purl}?checksum=sha256:{file.sha256}&file_name={urllib.parse.quote(file.name)}"


class Bill(NamedTuple):
    """`subject` is what it is about, such as "lock py39-tf2.10 on linux"; `url` is where a mirror has the files."""

    subject: str
    components: List[Component]
    created: str
    tool: str
    url: Optional[str] = None

    @property
    def uuid(self):
        """An identifier that is the same for the same components."""
        said = repr((self.subject, self.url, [(one.purl, one.license, one.files) for one in self.components]))
        return uuid.uuid5(uuid.NAMESPACE_URL, said)

    def where(self, file):
        """The address of a file, or its name alone."""
        return f"{self.url.rstrip('/')}/{urllib.parse.quote(file.name)}" if self.url else file.name


def now() -> str:
    """The time of a bill, in UTC. SOURCE_DATE_EPOCH sets it, so that a bill can be made again byte by byte."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    time = datetime.datetime.utcfromtimestamp(int(epoch)) if epoch else datetime.datetime.utcnow()
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def of_environment(packages, record, lock: Optional[locks.Lock], system: str) -> List[Component]:
    """The components of an environment.

    Args:
        packages: {name: [installed.Package, …]}; Python imports the first of each.
        record: the record of the locks.
        lock: the lock of the environment; None if there is none.
        system: as in the matrix.
    """
    locked = lock.packages.get(system, {}) if lock else {}
    recorded = licenses.read()
    components = []
    for name in sorted(packages):
        package = packages[name][0]
        is_locked = lock is not None and locked.get(name) == package.version
        files = locks.files(record, lock.env_name, system, name, package.version) if is_locked and lock else []
        license_ = licenses.of(package.license_expression, package.license_words, recorded.get(name))
        components.append(Component(name, package.version, license_, files))
    return components


def of_lock(record, lock: locks.Lock, system: str) -> List[Component]:
    """The components that a lock installs on a system."""
    recorded = licenses.read()
    return [
        Component(
            name,
            version,
            licenses.of(None, [], recorded.get(name)),
            locks.files(record, lock.env_name, system, name, version),
        )
        for name, version in sorted(lock.packages[system].items())
    ]


def lacking(components: List[Component]) -> Dict[str, Any]:
    """What a bill can't say of some components: {"hashes" or "licenses": how many lack them}."""
    numbers = {
        "hashes": sum(not one.files for one in components),
        "licenses": sum(one.license.words is None for one in components),
    }
    return {name: number for name, number in numbers.items() if number}
