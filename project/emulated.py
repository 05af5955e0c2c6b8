"""Run environments of the matrix on TensorFlow's own build for Linux aarch64, on Linux x86_64 under QEMU.

    python project/emulated.py run FOLDER py311-tf2.15 ... install, test, record and remove each environment
    python project/matrix.py --work-dir FOLDER/results      write the results into MATRIX.md

An environment is what tox makes of it on Linux aarch64: the same dependencies, constraints, markers and tests, and the
wheel of this checkout. The interpreters are Debian's: 3.9 of bullseye, 3.11 of bookworm, 3.13 of trixie, each in a root
of its own in FOLDER, which takes 4 GB at most. Needs Linux x86_64, root, the Pythons that the environments are named
after, the commands debootstrap, unshare, git, uv and tox, and an entry for aarch64 in /proc/sys/fs/binfmt_misc, which
Debian's package qemu-user-static makes.
"""

import os
import sys

import foreign

RELEASES = {"3.9": "bullseye", "3.11": "bookworm", "3.13": "trixie"}
"""Which Debian release has which Python."""

ENTRY = "/proc/sys/fs/binfmt_misc/qemu-aarch64"
REGISTER = "Register it: install qemu-user-static; where no systemd runs, mount -t binfmt_misc binfmt_misc "
REGISTER += "/proc/sys/fs/binfmt_misc and write the line of /usr/lib/binfmt.d/qemu-aarch64.conf into its `register`."


class Aarch64(foreign.System):
    platform = "linux-arm64"
    tools = foreign.System.tools + ("qemu-aarch64-static",)

    def can_run(self, env_name):
        return foreign.python_of(env_name) in RELEASES

    def root(self, folder, env_name):
        return os.path.join(folder, RELEASES[foreign.python_of(env_name)])

    def make(self, folder, env_name):
        if not os.path.exists(ENTRY):
            raise foreign.Failed(f"There is no {ENTRY}. {REGISTER}")
        super().make(folder, env_name)

    def make_root(self, root, env_name):
        packages = "--include=python3,python3-venv,ca-certificates"
        release = RELEASES[foreign.python_of(env_name)]
        foreign.run(["debootstrap", "--arch=arm64", "--variant=minbase", packages, release, root])

    def under(self, folder, env_name):
        return "QEMU " + foreign.run(["qemu-aarch64-static", "--version"]).split()[2]

    def unpack_python(self, folder, env_name):
        root = self.root(folder, env_name)
        make = ["python3", "-m", "venv", "--without-pip", foreign.ENV_FOLDER + "/venv"]
        foreign.run(foreign.entered(root, make, self.environment))
        version = "import platform; print(platform.python_version())"
        said = foreign.run(foreign.entered(root, self.python() + ["-c", version], self.environment)).strip()
        return (
            self.place(folder, env_name, "venv", "lib", "python" + foreign.python_of(env_name), "site-packages"),
            said,
        )

    def python(self):
        return [foreign.ENV_FOLDER + "/venv/bin/python"]


if __name__ == "__main__":
    sys.exit(foreign.main(Aarch64(), __doc__))
