"""The part of a device host that lives inside its rank. Standard library alone until torch is there.

`dynamix.startup` loads it where Python starts.
"""
