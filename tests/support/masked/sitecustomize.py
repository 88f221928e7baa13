"""Python imports this before anything else, where the folder is on PYTHONPATH: so children of tests are masked, too."""

import os

if os.environ.get("CKPT_TEST_PLATFORM"):
    import masked_platform

    try:
        masked_platform.install(os.environ["CKPT_TEST_PLATFORM"])
    except BaseException:  # which Python would print, and go on unmasked
        import traceback

        traceback.print_exc()
        os._exit(70)
