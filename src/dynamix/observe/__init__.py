"""Whether an unchanged job is worth distributing, and what it loses: `torchrun ... -m dynamix.observe train.py`.

The ranks run three parts: `hooks` marks where a step's parts begin and end, `recorder` makes rows of them, `rank_file`
writes them. Afterwards, or meanwhile and elsewhere: `joined` puts the ranks' rows together, `findings` says who waits
for whom, `gains` what could be gained, `pays` whether distributing pays, `words` says all in plain words, and `run`
writes the run folder.
"""
