"""What `python -m paddle.distributed.launch` starts: it takes a file, and hands the rest on to the training."""

import runpy

runpy.run_module("rn50_paddle.train", run_name="__main__", alter_sys=True)
