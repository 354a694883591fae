"""Started as a rank: waits until it is in its control group, enters its network namespace, becomes the command.

Standard library only and started by path: a rank must not pay for importing torch twice.
Arguments: GO_FD NETWORK_FD COMMAND...; NETWORK_FD -1 stays in the namespace of the parent.
"""

import ctypes
import os
import sys

_CLONE_NEWNET = 0x40000000


def main(go_fd: int, network_fd: int, command: list[str]) -> None:
    """Does not return: becomes `command`, or exits with 127 if there is no such program."""
    # The owner writes a byte once this process is limited; a closed pipe means that the owner is gone.
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
