"""The part of a device host that runs inside its rank. It uses only the standard library until torch is loaded.

`dynamix.startup` loads it when Python starts.
"""
