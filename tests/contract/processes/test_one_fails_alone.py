"""What fails on one process alone, outside of any agreement: the others hear of it at once, and all go on from the same steps."""

from tests.support.launch import launch, reports

COMMON = """
import threading
options = ckpt.Options(timeout_secs=600, persist_policy=ckpt.when.every_steps(2))
local = f"{directory}.local.{index}"

def state(step):
    return put(np.arange(8, dtype=np.float32) + step)

told = {}
"""
RESTORES = """
with ckpt.Checkpointer(directory, local_directory=local, options=options) as run:
    found = run.restore_latest(state=state(0))
    told["back"] = [run.all_steps(), found.step, same(found["state"], state(found.step))]
report(**told)
"""

# A directory that one process cannot list.
FAILING = """
def fails(*_, **__):
    raise OSError(5, "Input/output error")

def unlisted(where):
    # the disk of one process gives no listing; gives what ends that
    real = os.scandir, os.listdir
    def failing(plain):
        return lambda path=".": fails() if str(path).startswith(directory) else plain(path)
    if index == where:
        os.scandir, os.listdir = map(failing, real)
    def recover():
        os.scandir, os.listdir = real
    return recover

def interrupts(call):
    # Ctrl-C when the main thread is in this call
    main, names = threading.main_thread().ident, []
    while call not in names:
        frame, names = sys._current_frames()[main], []
        while frame:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
    signal.pthread_kill(main, signal.SIGINT)

with ckpt.Checkpointer(directory, options=options) as run:
    for step in range(6):
        run.save(step, state(step))
    run.wait_until_finished()
    for nth, call in enumerate((lambda: run.delete(1), lambda: run.rollback_to(4), lambda: run.wait_for_new_step(0))):
        recover = unlisted(1)  # it does not even ask
        told[f"listing {nth}"] = raised(call)
        recover()
    told["steps"] = run.all_steps()
    told["again"] = run.save(4, state(4))  # it is there: neither written nor compared, on both alike
    told["new"] = run.save(6, state(6))
    run.wait_until_finished()
    told["bad argument"] = raised(lambda: run.wait_for_new_step("6"))["type"]
    stop = KeyboardInterrupt if index == 0 else ckpt.CheckpointError
    if index == 0:
        threading.Thread(target=interrupts, args=("wait_for_new_step",), daemon=True).start()
    try:
        run.wait_for_new_step(6)
    except stop as error:
        told["interrupt"] = str(error)
    told["after"] = run.wait_for_new_step(5)
report(**told)
"""


def test_listings_that_fail_on_one_process(tmp_path):
    """Each process listed before all agreed: a listing that failed on one sent it another way."""
    both = reports(launch(COMMON + FAILING, tmp_path / "run"))
    for index, told in enumerate(both):
        assert [told[f"listing {nth}"] for nth in range(3)] == [None] * 3, told
        assert told["steps"] == [0, 2, 3, 4] and told["again"] is False and told["new"] is True, (
            told
        )
        assert told["bad argument"] == "TypeError" and told["after"] == 6, told
        text = told["interrupt"]
        assert (
            index == 0 or text == "process 0 could not wait for a new step: KeyboardInterrupt: "
        ), told
    code = COMMON + RESTORES.replace("local_directory=local, ", "")
    for told in reports(launch(code, tmp_path / "run")):
        assert told["back"] == [[0, 2, 3, 4, 6], 6, True], told


CONSTRUCTS = """
if index == 1:
    open(local, "w").close()

def construct():
    global run
    run = ckpt.Checkpointer(directory, local_directory=local, options=options)

told["first"] = raised(construct)
if index == 1:
    os.unlink(local)
told["again"] = raised(construct)
run.save(4, state(4))
run.wait_until_finished()
told["steps"] = run.all_steps()
run.close()
report(**told)
"""


def test_a_local_directory_that_one_process_cannot_have(tmp_path):
    """The others waited ``timeout_secs`` for it, and where they tried again all made different calls."""
    for index, told in enumerate(reports(launch(COMMON + CONSTRUCTS, tmp_path / "run"))):
        error = told["first"]
        assert error["type"] == ("NotADirectoryError" if index else "CheckpointError"), told
        assert (
            "process 1 could not open local steps: NotADirectoryError" in error["text"] or index
        ), told
        assert told["again"] is None and told["steps"] == [4], told
    for told in reports(launch(COMMON + RESTORES, tmp_path / "run")):
        assert told["back"] == [[4], 4, True], told
