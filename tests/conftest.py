"""Eight CPU devices for every test, and what else must be settled before jax is imported."""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

PLATFORM = os.environ.get("CKPT_TEST_PLATFORM", "")
if PLATFORM:  # here, and by sitecustomize in all children
    MASKED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "support", "masked")
    sys.path.insert(0, MASKED)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [MASKED, os.environ.get("PYTHONPATH")]))
    import masked_platform

    if "ckpt_core._platform" not in sys.modules:
        masked_platform.install(PLATFORM)

pytest.register_assert_rewrite("tests.support")  # before anything imports it

if "jax" in sys.modules:
    # The flags below would come too late, and half of the suite would quietly test one device.
    raise RuntimeError("jax was imported before tests/conftest.py, by a pytest plugin perhaps")

DEVICES = 8
_FLAG = "--xla_force_host_platform_device_count"
# Children of the tests inherit these.
BACKEND = os.environ.get("CKPT_TEST_BACKEND", "cpu")
os.environ["JAX_PLATFORMS"] = BACKEND if BACKEND == "cpu" else f"{BACKEND},cpu"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}={DEVICES}".strip()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's notes on CPU features

# A shell that starts a command in the background has it ignore the interrupts that tests send to their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The first example compiles, and the machine may be busy: time is no property under test.
hypothesis.settings.register_profile(
    "here", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "ci", hypothesis.settings.get_profile("here"), derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")


# Of the whole session, and of it only if all tests take them from here: a server starts in seconds.
from tests.support.seconds import (  # noqa: E402, F401
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
)
from tests.support.stores import make_s3_url, make_server, make_store  # noqa: E402, F401


class _Extras:
    """Found last: a file of tests that imports a package which only `make test` installs is skipped, and says why."""

    NAMES = ("equinox", "flax", "grain", "h5py", "keras", "matplotlib", "optax", "orbax", "psutil")
    NAMES += ("rich", "safetensors", "sklearn", "tensorboard", "torch", "torchax", "typer", "yaml")

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in self.NAMES:
            pytest.skip(f"needs {name}: `make test` installs it", allow_module_level=True)


def pytest_collection() -> None:
    sys.meta_path.append(_Extras())  # type: ignore[arg-type]


def pytest_collection_finish() -> None:
    """Has the garbage collector leave out what lives as long as the session: each full pass over it takes up to half a second."""
    sys.meta_path[:] = [one for one in sys.meta_path if not isinstance(one, _Extras)]
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests of what only Linux has, elsewhere and where it is masked."""
    marker = item.get_closest_marker("linux")
    if marker is not None and (PLATFORM or sys.platform != "linux"):
        pytest.skip(f"only Linux has it: {marker.args[0]}")


@pytest.fixture(autouse=True)
def sigterm_as_before() -> Iterator[None]:
    """A fit that a test interrupts goes on listening, and would hear the signals of later tests."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if before is not None and signal.getsignal(signal.SIGTERM) != before:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def devices() -> list[Any]:
    """All devices: eight, of the CPU."""
    import jax

    if BACKEND != "cpu":
        pytest.skip(
            f"a test of {DEVICES} devices, which the CPU is divided into: CKPT_TEST_BACKEND={BACKEND}"
        )
    found = jax.devices()
    assert len(found) == DEVICES, found
    return found


@pytest.fixture(scope="session")
def mesh(devices: list[Any]) -> Any:
    """A mesh of 4 x 2 devices with the axes `data` and `model`."""
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(devices).reshape(4, 2), ("data", "model"))


@pytest.fixture(scope="session")
def run_python() -> Callable[..., Any]:
    """Runs code in a fresh interpreter; gives what it prints last, read as JSON."""

    from tests.support import children

    def run(code: str, *arguments: str, timeout_secs: float = 120, **environment: str) -> Any:
        result = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=children.environment(**environment),
            capture_output=True,
            text=True,
            timeout=timeout_secs,
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    return run
