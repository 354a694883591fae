"""`dynamix demo`: one job on emulated devices of unlike speed, trained in the ways that a practitioner chooses from."""
