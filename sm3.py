"""sm3.py SEED NAME JSON: team training variants on single-file; forced rest and gate."""
import sys, json, time, torch, dataclasses, numpy as np, functools
torch.set_num_threads(1)
from dynamix_lab.excavation.config import ExperimentConfig, task_of
from dynamix_lab.excavation.mappo import MAPPOTraining, MAPPOConfig
from dynamix_lab.excavation.lessons import Stage
from dynamix_lab.excavation.learner import evaluate
from dynamix_lab.excavation.trial import lost_and_back
from dynamix_lab.excavation.resting import Forced, Thresholds
from dynamix_lab.excavation.gate_search import learn_gate
seed=int(sys.argv[1]); name=sys.argv[2]; over=json.loads(sys.argv[3]) if len(sys.argv)>3 else {}
stages=over.pop("stages",None); gate_over=over.pop("gate",{})
cfg=ExperimentConfig.of(ground="single-file"); task=task_of(cfg.task,"mappo-typed")
st=cfg.stages if stages is None else tuple(Stage(tuple(a),n,e) for a,n,e in stages)
t=time.time()
m=MAPPOTraining(task,dataclasses.replace(cfg.mappo,traces=True,**{"resters":(0.125,0.4),**{k:tuple(v) if isinstance(v,list) else v for k,v in over.items()}}),stages=st,worlds=16,seed=seed)
m.run()
torch.save(m.state_dict(),f"/work/main/runs/agent/{name}-{seed}.pt")
print("trained",int(time.time()-t),flush=True)
def show(r): return {k:round(r[k],3) for k in ("pellets_per_1000","gini","halves")}
for n in range(4): print("forced",n,show(evaluate(m.act,task,agents=8,worlds=16,seed=991_000+seed,gate=functools.partial(Forced,count=n)).summary()),flush=True)
g=learn_gate(m.act,task,dataclasses.replace(cfg.gate,**{"enough":0.25,**gate_over}),seed=seed); print(g)
gate=lambda env: Thresholds(env,g,seed=seed)
for s in (991_000,992_000):
    print("gate",show(evaluate(m.act,task,agents=8,worlds=16,seed=s+seed,gate=gate).summary()))
print(lost_and_back(m.act,task,gate,agents=8,worlds=16,seed=seed)); print("all",time.time()-t)
