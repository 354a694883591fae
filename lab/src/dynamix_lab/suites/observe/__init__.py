"""`dynamix bench observe`: whether `dynamix observe` names the slow rank, what it promises, and what it costs."""
