"""Imported by every Python that finds it first: refuses connections to other machines, and writes down that one was tried."""

import os
import sys


def refuse(event, arguments):
    """An audit hook. Names of this machine, and sockets of a file system, are nobody else's."""
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in (None, "", "localhost", "127.0.0.1", "::1"):
        with open(os.environ["NETWORK_TRIED"], "a") as file:
            print(event, arguments[:2], file=file)
        raise ConnectionRefusedError(f"no network in tests: {host}")


if "NETWORK_TRIED" in os.environ:
    sys.addaudithook(refuse)
