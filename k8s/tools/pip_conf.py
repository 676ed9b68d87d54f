"""Prints what an image build needs of this machine's pip configuration, or with --mounts the files that it names.

A pip.conf with the package indexes, certificate and wheel folders that pip is configured for here. It is given to the
build as a secret, so that no address of a machine gets into an image or into the repository. Indexes on this machine's
disk are left out: the lock files name what is published.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

KEYS = ("index-url", "extra-index-url", "find-links", "cert", "trusted-host", "timeout", "default-timeout")


def settings(listing: str) -> dict[str, list[str]]:
    """Key -> words, from what `pip config list` prints; the environment's come last there and count."""
    found: dict[str, list[str]] = {}
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        if key in KEYS:
            words = value.strip().strip("'\"").replace("\\n", " ").split()
            found[key.removeprefix("default-")] = [word for word in words if not word.startswith("file:")]
    return {key: words for key, words in found.items() if words}


def main() -> int:
    """Writes to standard output."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = settings(done.stdout)
    if "--mounts" in sys.argv[1:]:
        for word in (*found.get("find-links", ()), *found.get("cert", ())):
            if Path(word).is_absolute() and Path(word).exists():
                print(word)
        return 0
    print("[global]")
    for key, words in found.items():
        print(f"{key} = {' '.join(words)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
