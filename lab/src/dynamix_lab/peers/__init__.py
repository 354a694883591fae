"""Other libraries compared with dynamix: plain DDP, AdaptDL and Hivemind on emulated hosts (docs/design/peers.md)."""
