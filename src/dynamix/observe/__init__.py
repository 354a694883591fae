"""Measures whether distributing an unchanged job pays, and what it loses: `torchrun ... -m dynamix.observe train.py`.

The ranks run three parts: `hooks` marks where a step's parts begin and end, `recorder` turns marks into rows, and
`rank_file` writes them. Afterwards, or meanwhile in another process: `joined` combines the ranks' rows, `findings` says
which rank delays which, `gains` what could be gained, and `pays` whether distributing pays. `words` puts all of it into
sentences, and `run` writes the run folder.
"""
