"""The program of `forks.py`: has a fork made, passes signals on to it, and ends as it ends. Imports little, to start soon."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def connected(address: str, parent: int) -> socket.socket:
    """The parent's socket, which is there when it has imported its modules; the end of this process when the parent is gone."""
    while True:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(address)
            return link
        except OSError:
            link.close()
            try:
                with open(f"/proc/{parent}/stat") as file:
                    dropped = file.read().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                dropped = True
            if dropped:
                sys.exit(farewell(address))
            time.sleep(0.05)


def farewell(address: str) -> str:
    """What to say when the parent is gone: its last words."""
    with open(os.path.join(os.path.dirname(address), "log")) as file:
        return f"the process that was to be forked is gone: {file.read()[-2000:]}"


def main() -> None:
    address, parent, *arguments = sys.argv[1:]
    ignored = [number for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    order = {
        "arguments": arguments,
        "ignored": ignored,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
    }
    link = connected(address, int(parent))
    body = json.dumps(order).encode()
    replies = link.makefile("r")
    try:
        socket.send_fds(link, [len(body).to_bytes(8, "big")], [0, 1, 2])
        link.sendall(body)
        child = int(replies.readline())
    except (ConnectionError, ValueError):  # the parent ended between its last connection and this order
        sys.exit(farewell(address))
    for number in set(FORWARDED) - set(ignored):
        signal.signal(number, lambda got, _: os.kill(child, got))
    status = int(replies.readline() or -signal.SIGKILL)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
