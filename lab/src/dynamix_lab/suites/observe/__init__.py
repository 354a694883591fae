"""`dynamix bench observe`: whether `dynamix observe` names the slow rank, keeps its promises, and what it costs."""
