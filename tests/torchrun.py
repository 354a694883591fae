"""torchrun as a script, for `start_script`: an agent in a new interpreter takes two seconds to import torch."""

from torch.distributed.run import main

if __name__ == "__main__":
    main()
