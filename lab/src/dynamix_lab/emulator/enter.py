"""Starts a rank: waits until it is in its control group, enters its network namespace, and becomes the command.

It uses the standard library only and is started by path, so that a rank need not import torch twice.
Arguments: GO_FD NETWORK_FD COMMAND...; NETWORK_FD -1 stays in the namespace of the parent.
"""

import ctypes
import os
import sys

_CLONE_NEWNET = 0x40000000


def main(go_fd: int, network_fd: int, command: list[str]) -> None:
    """Does not return: becomes `command`, or exits with 127 if there is no such program."""
    # The owner writes a byte once this process is limited. A closed pipe means that the owner has ended.
    if not os.read(go_fd, 1):
        sys.exit(1)
    os.close(go_fd)
    if network_fd >= 0:
        if ctypes.CDLL(None, use_errno=True).setns(network_fd, _CLONE_NEWNET) != 0:
            sys.exit(f"cannot enter the emulated host: {os.strerror(ctypes.get_errno())}")
        os.close(network_fd)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
