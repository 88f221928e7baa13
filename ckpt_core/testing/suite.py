"""Pytest classes that test what every adapter promises.

A test class for an adapter inherits one of them and defines two fixtures::

    from ckpt_core.testing import InPlaceSuite

    def make_model(seed): ...          # at the top of the module: a new process imports it
    def train_step(model): ...

    class TestMyModels(InPlaceSuite):
        @pytest.fixture
        def make(self):
            return make_model          # same structure, different values for every seed

        @pytest.fixture
        def step(self):
            return train_step          # changes the model in place; its result is compared

``InPlaceSuite`` is for objects that are set in place, through an adapter or through their own
``get_state`` and ``set_state``; ``PytreeSuite`` for immutable pytrees, where ``step(tree)`` returns
the new one. A fixture with ``params`` runs the whole suite for several objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

from ckpt_core._errors import CheckpointCorrupt, StructureMismatch, UnsupportedLeaf
from ckpt_core._load import load, restore
from ckpt_core._options import Options
from ckpt_core._run.checkpointer import Checkpointer
from ckpt_core._save import save, save_async
from ckpt_core.testing import _tools
from ckpt_core.testing._prints import Prints, leaves_only, prints_of
from ckpt_core.testing._resume import Write, assert_exact_resume
from ckpt_core.testing._tools import require_same

Make = Callable[[int], Any]
Step = Callable[[Any], Any]


class _Suite:
    """The tests of both kinds of objects; a step and a restore return what they do for pytrees."""

    @pytest.fixture
    def make(self) -> Make:
        """``make(seed)`` creates the object to save: same structure, different values for each seed. It must be a
        function at the top of a module, because a new process imports it by name.
        """
        raise NotImplementedError("the test class needs a fixture `make` that returns make(seed)")

    @pytest.fixture
    def step(self) -> Step:
        """``step(object)`` changes it as one training step does; also at the top of a module. It changes the object in
        place and returns the value to compare (a loss, a batch); for pytrees, it returns the new tree.
        """
        raise NotImplementedError("the test class needs a fixture `step` that returns step(object)")

    @pytest.fixture
    def misfits(self) -> Mapping[str, Callable[[], Any]] | None:
        """Name -> function that makes a target that a checkpoint of ``make(0)`` does not fit. None derives them from the
        saved leaves: another shape, another dtype, one leaf too few, one too many. Adapters with ``per_process`` states
        must define this.
        """
        return None

    @pytest.fixture
    def shard(self) -> Callable[[Any], Any]:
        """``shard(object)`` returns the object with its arrays sharded over several devices. The default uses
        ``set_state``: it shards the first axis that the devices divide, replicates arrays without one, and leaves scalars
        as they are.
        """
        return self._sharded

    @pytest.fixture
    def frameworks(self, make: Make) -> tuple[str, ...]:
        """Packages that loading the checkpoint must not need; by default those of the adapter."""
        return _tools.packages_of(make(0))

    def test_comes_back_bit_for_bit(self) -> None:
        saved, _ = self._advance(self._make(0))
        expected = prints_of(saved)
        save(self._path, subject=saved)
        require_same(expected, prints_of(saved), "saving changed the object: it")
        target = self._make(1)
        if prints_of(target) == expected:
            pytest.fail("make(1) equals make(0) after a step, so that nothing would be tested")
        require_same(expected, prints_of(self._restored(target)), "what came back")

    def test_goes_on_bit_for_bit(self) -> None:
        saved = self._save()
        expected = self._goes_on(saved)
        restored = self._restored(self._make(1))
        require_same(expected, self._goes_on(restored), "training after the restore")

    def test_restores_again_and_into_what_was_saved(self) -> None:
        subject = self._save()
        expected = prints_of(subject)
        for _ in range(2):
            subject, _ = self._advance(subject)
            subject = self._restored(subject)
            require_same(expected, prints_of(subject), "what came back")

    def test_in_a_new_process(self) -> None:
        saved = self._save()
        found = _tools.call(_restore_and_go_on, type(self), self._make, self._step, str(self._path))
        require_same(prints_of(saved), found["restored"], "what came back in a new process")
        expected = self._goes_on(saved)
        require_same(expected, found["then"], "training in a new process")

    def test_loads_without_the_framework(self, frameworks: tuple[str, ...]) -> None:
        saved = self._save()
        found = _tools.call(_load_without, frameworks, str(self._path))
        expected = leaves_only(prints_of(saved))
        require_same(expected, leaves_only(found["loaded"]), f"loading without {frameworks}")

    def test_training_resumes_exactly(self) -> None:
        def train(directory: Path, report: Callable[..., None]) -> None:
            subject = self._make(0)
            with Checkpointer(directory) as checkpointer:
                restored = checkpointer.restore_latest(subject=subject)
                if restored:
                    subject = restored["subject"]
                for number in range((restored.step or 0) + 1 if restored else 0, 5):
                    subject, outcome = self._advance(subject)
                    report(number, outcome=outcome, subject=subject)
                    checkpointer.save(number, subject=subject)

        assert_exact_resume(train, interrupt_at=(2, 3), directory=self._folder)

    def test_the_snapshot_is_of_the_call(self) -> None:
        subject, _ = self._advance(self._make(0))
        expected = prints_of(subject)
        with _tools.writers_held_back():
            pending = save_async(self._path, subject=subject)
            for _ in range(2):
                subject, _ = self._advance(subject)
        pending.result()
        require_same(expected, prints_of(self._restored(self._make(1))), "the snapshot")

    def test_arrays_may_be_donated_after_the_call(self) -> None:
        subject = self._make(0)
        arrays = _tools.arrays_of(subject)
        if not arrays:
            pytest.skip("there are no jax arrays in it")
        expected = prints_of(subject)
        with _tools.writers_held_back():
            pending = save_async(self._path, subject=subject)
            _tools.donate(arrays)
        pending.result()
        require_same(expected, prints_of(self._restored(self._make(1))), "the snapshot")

    def test_what_does_not_fit_is_refused_before_anything_is_read(
        self, misfits: Mapping[str, Callable[[], Any]] | None
    ) -> None:
        if misfits is not None:
            save(self._path, subject=self._make(0))
            for name, make_target in misfits.items():
                self._refuses(make_target(), name)
            return
        if self._judges_for_itself(self._make(0)):
            pytest.skip("the object takes whatever was saved, and judges for itself")
        for kind, tree, path in _tools.misfitting_trees(self._make(0)):
            save(self._folder / kind, subject=tree)
            # The data is damaged, so reading any of it would raise another error.
            for file in _tools.files_below(self._folder / kind / "subject"):
                if file.parent.name == "d":
                    _tools.flip(file)
            error = self._refuses(self._make(1), kind, self._folder / kind)
            found = [(mismatch.kind, mismatch.path) for mismatch in error.mismatches]
            if found != [(kind, path)]:
                pytest.fail(f"{kind} of {path}: the reported mismatches are {found}")

    def test_damage_is_found_and_changes_nothing(self) -> None:
        first, second = (self._advance(self._make(0))[0] for _ in range(2))
        save(self._path, first=first, second=second)
        first, second = self._make(1), self._make(2)
        before = prints_of(first), prints_of(second)
        found = 0
        for file in _tools.files_below(self._path / "second"):
            whole = _tools.flip(file)
            try:
                restore(self._path, first=first, second=second)
            except CheckpointCorrupt:
                found += 1
            else:  # a restore does not read that byte
                first, second = self._make(1), self._make(2)
                continue
            finally:
                file.write_bytes(whole)
            require_same(before[0], prints_of(first), "after damage elsewhere, the other object")
            require_same(before[1], prints_of(second), "after damage, the object")
        if not found:
            pytest.fail("a flipped byte was found in no file of the item")

    def test_committedness_is_kept(self) -> None:
        self._save()
        target = self._make(1)
        before = _tools.placement_of(target)
        _tools.require_placement(before, self._restored(target))

    def test_shardings_are_kept(self, shard: Callable[[Any], Any]) -> None:
        if len(jax.devices()) < 2:
            pytest.skip("there is one device only")
        saved = self._save()
        expected = prints_of(saved)
        target = self._make(1)
        if not any(array.shape for array in _tools.arrays_of(target)):
            pytest.skip("there are no jax arrays with axes in it")
        target = shard(target)
        before = _tools.placement_of(target)
        if all(len(sharding.device_set) < 2 for sharding, _ in before.values()):
            pytest.fail("shard(object) left every array on one device")
        restored = self._restored(target)
        _tools.require_placement(before, restored)
        require_same(expected, prints_of(restored), "what came back, sharded,")
        save(self._folder / "sharded", subject=restored)
        again = self._restored(self._make(1), self._folder / "sharded")
        require_same(expected, prints_of(again), "what was saved sharded")

    @pytest.fixture(autouse=True)
    def _given(self, make: Make, step: Step, tmp_path: Path) -> None:
        self._make, self._step = make, step
        self._folder, self._path = tmp_path, tmp_path / "a"

    def _advance(self, subject: Any) -> tuple[Any, Any]:
        """The object after a step, and the value to compare."""
        return self._step(subject), None

    def _save(self) -> Any:
        """Saves an object after a step, and returns it."""
        saved, _ = self._advance(self._make(0))
        save(self._path, subject=saved)
        return saved

    def _restored(self, target: Any, path: Path | None = None) -> Any:
        return restore(path or self._path, subject=target)["subject"]

    def _sharded(self, subject: Any) -> Any:
        return _tools.laid_out(subject)

    def _judges_for_itself(self, subject: Any) -> bool:
        return False

    def restore_and_go_on(self, make: Make, step: Step, path: str) -> dict[str, Prints]:
        """The prints of a new object after a restore, and of further training."""
        self._step, self._path = step, Path(path)
        restored = self._restored(make(1))
        return {"restored": prints_of(restored), "then": self._goes_on(restored)}

    def _goes_on(self, subject: Any) -> Prints:
        """Prints of the results of three more steps, and of the object after them."""
        prints: Prints = {}
        for number in range(3):
            subject, outcome = self._advance(subject)
            prints |= {f"step {number}: {path}": text for path, text in prints_of(outcome).items()}
        return prints_of({"after": subject}) | prints

    def _refuses(self, target: Any, what: str, path: Path | None = None) -> StructureMismatch:
        before = prints_of(target)
        try:
            self._restored(target, path)
        except StructureMismatch as error:
            require_same(before, prints_of(target), f"after the refusal of {what}, the target")
            return error
        pytest.fail(f"{what}: a checkpoint that does not fit was restored")


class _Refuses:
    """A user's object whose ``set_state`` fails, after the other objects were set."""

    def get_state(self) -> Any:
        return {"number": 1}

    def set_state(self, state: Any) -> None:
        raise ZeroDivisionError


class InPlaceSuite(_Suite):
    """For objects that a restore changes in place: models, optimizers, iterators."""

    def test_inside_containers(self) -> None:
        if getattr(_tools.adapter_of(self._make(0)), "per_process", False):
            pytest.skip("state of a process is an item of its own")
        saved = {"one": self._make(0), "more": [self._make(1), 7]}
        self._advance(saved["one"])
        expected = prints_of(saved)
        save(self._path, saved)
        target = {"one": self._make(2), "more": [self._make(3), 0]}
        value = restore(self._path, state=target)["state"]
        require_same(expected, prints_of(value), "what came back in a container")
        require_same(expected, prints_of({**target, "more": [target["more"][0], 7]}), "the objects")

    def test_load_gives_a_copy_or_refuses(self) -> None:
        saved = self._save()
        expected = prints_of(saved)
        target = self._make(1)
        before = prints_of(target)
        try:
            loaded = load(self._path, target, item="subject")
        except UnsupportedLeaf as error:
            if "restore" not in str(error):
                raise  # not the refusal to copy
            require_same(before, prints_of(target), "load refused the object, and changed it: it")
            return
        require_same(before, prints_of(target), "load changed the object that it was given: it")
        require_same(expected, prints_of(loaded), "the copy")
        self._advance(loaded)
        require_same(before, prints_of(target), "training with the copy changed the object: it")

    def test_what_fails_later_names_what_was_set(self) -> None:
        saved, _ = self._advance(self._make(0))
        save(self._path, subject=saved, last=_Refuses())
        target = self._make(1)
        before = prints_of(target)
        for options in (Options(atomic_restore=True), Options()):
            with pytest.raises(ZeroDivisionError) as caught:
                restore(self._path, subject=target, last=_Refuses(), options=options)
            if "subject" not in "".join(getattr(caught.value, "__notes__", ())):
                what = "after a restore that failed and did not name it, the object"
                require_same(before, prints_of(target), what)
        self._restored(target)
        require_same(prints_of(saved), prints_of(target), "after one more restore, the object")

    def _advance(self, subject: Any) -> tuple[Any, Any]:
        return subject, self._step(subject)

    def _restored(self, target: Any, path: Path | None = None) -> Any:
        if super()._restored(target, path) is not target:
            pytest.fail(f"a {type(target).__name__} was not restored in place")
        return target

    def _sharded(self, subject: Any) -> Any:
        adapter = _tools.adapter_of(subject)
        adapter.set_state(subject, _tools.laid_out(adapter.get_state(subject)))
        return subject

    def _judges_for_itself(self, subject: Any) -> bool:
        return bool(getattr(_tools.adapter_of(subject), "accepts_any_structure", False))


class PytreeSuite(_Suite):
    """For immutable pytrees: ``step(tree)`` and a restore return new trees."""

    def test_comes_back_without_a_target(self) -> None:
        saved = self._step(self._make(0))
        save(self._path, saved)
        require_same(prints_of(saved), prints_of(load(self._path)), "what came back")

    def test_comes_back_into_shapes(self) -> None:
        saved = self._step(self._make(0))
        save(self._path, saved)
        loaded = load(self._path, _tools.abstract(self._make(1)))
        require_same(prints_of(saved), prints_of(loaded), "what came back")

    @pytest.fixture
    def frameworks(self, make: Make) -> tuple[str, ...]:
        """Packages that loading the checkpoint must not need: those of the containers' classes."""
        return _tools.packages_of_containers(make(0))


def _restore_and_go_on(write: Write, suite: type[_Suite], *given: Any) -> None:
    """Runs in a new process."""
    write(suite().restore_and_go_on(*given))


def _load_without(write: Write, frameworks: tuple[str, ...], path: str) -> None:
    """Runs in a new process that cannot import the frameworks: loads without a target."""
    with _tools.blocked(frameworks):
        write({"loaded": prints_of(load(path, item="subject"))})
