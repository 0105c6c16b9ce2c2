"""Programs in processes of their own. Each process is a fork of a kept process that has imported torch and nothing of
this package. An import of torch takes two seconds of a processor.

A test about the import of torch or about the options of Python starts Python itself.
"""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path


@functools.cache
def _server():
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.stdin.close)  # the server then ends
    return server


def python(code, *arguments, env=None, cwd=None, timeout=120):
    """What subprocess.run returns of ``python -c code arguments..``, with its output as text."""
    with tempfile.TemporaryDirectory() as folder:
        said = [str(Path(folder, name)) for name in ("stdout", "stderr")]
        request = {
            "code": code,
            "arguments": list(map(str, arguments)),
            "env": dict(os.environ if env is None else env),
        }
        request |= {"cwd": str(cwd or os.getcwd()), "timeout": timeout, "said": said}
        server = _server()
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(["python", "-c", code], status, *(Path(path).read_text() for path in said))


def module(name, *arguments, **options):
    """The same of ``python -W ignore -m name arguments..``."""
    return python(
        "import runpy, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "sys.path[0] = sys.path[0] or __import__('os').getcwd()\n"
        f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)\n",
        *arguments,
        **options,
    )


def _serve():
    """Returns the request in each fork."""
    import torch  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return json.loads(line)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()


def _run(request):
    signal.alarm(request["timeout"])
    for number, path in enumerate([os.devnull, *request["said"]]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.stdin = open(0, closefd=False)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv, sys.path[0] = ["-c", *request["arguments"]], ""
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    exec(compile(request["code"], "<string>", "exec"), program.__dict__)


if __name__ == "__main__":
    _run(_serve())
