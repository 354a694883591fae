"""Live peers beside dynamix: plain DDP, AdaptDL and Hivemind on the same emulated hosts (docs/design/peers.md)."""
