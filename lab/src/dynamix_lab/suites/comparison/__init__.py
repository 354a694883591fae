"""Policies compared on emulated hosts: one training job under one after the other, for `dynamix bench tta`."""
