"""What `make test` leaves out is decided by the median of the last three runs, and by nothing that did not run."""

from tests.support import seconds

KNOWN = {"a.py::one": (0.5, 0.6, 0.7), "a.py::left": (9.0,), "a.py::gone": (2.0,), "b.py::new": ()}


def test_a_run_adds_to_what_ran_and_forgets_what_is_gone():
    measured = {"a.py::one": 4.0, "a.py::quick": 0.1, "a.py::dear": 1.6}
    found = seconds.merged(KNOWN, measured, {"a.py::left"})
    assert found == {
        "a.py::one": (0.6, 0.7, 4.0),
        "a.py::left": (9.0,),
        "a.py::dear": (1.6,),
        "b.py::new": (),
    }
    assert seconds.slow(found) == {"a.py::left", "a.py::dear", "b.py::new"}
    assert seconds.read(seconds.text_of(found)) == found


def test_what_children_take_counts(run_python):
    before = seconds.cpu_secs()
    run_python("print(sum(i * i for i in range(3_000_000)))")
    assert seconds.cpu_secs() - before > 0.05
