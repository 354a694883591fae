"""Other libraries on the emulated hosts of dynamix: plain DDP, AdaptDL and Hivemind (docs/design/peers.md)."""
