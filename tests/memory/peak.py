"""peak.py FILE COMMAND...: runs the command, and writes its peak of resident bytes into FILE.

The kernel counts what a process was before exec with it: whoever starts the command has to be small, as this is."""
import os
import sys

child = os.fork()
if child == 0:
    os.execv(sys.argv[2], sys.argv[2:])
_, status, usage = os.wait4(child, 0)
with open(sys.argv[1], "w") as file:
    file.write(str(usage.ru_maxrss * 1024))
sys.exit(os.waitstatus_to_exitcode(status) & 0xff)
