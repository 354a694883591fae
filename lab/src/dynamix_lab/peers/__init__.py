"""Other libraries on the emulated hosts of dynamix: plain DDP, AdaptDL, Hivemind and torchft (docs/design/peers.md)."""
