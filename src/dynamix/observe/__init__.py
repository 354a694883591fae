"""What an unchanged job loses to its slow workers: `torchrun ... -m dynamix.observe train.py`.

In the ranks: `hooks` marks where a step's parts begin and end, `recorder` makes rows of them, `rank_file` writes them.
Afterwards, or meanwhile and elsewhere: `joined` puts the ranks' rows together, `findings` says who waits for whom,
`gains` what could be gained, `words` says both in plain words, and `run` writes the run folder.
"""
