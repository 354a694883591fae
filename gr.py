"""gr.py SEED NAME JSON: team training on drawn grounds; ten held-out grounds beside hand."""
import sys, json, time, torch, dataclasses, numpy as np, functools
torch.set_num_threads(1)
from dynamix_lab.excavation.config import ExperimentConfig, task_of
from dynamix_lab.excavation.ground import drawn
from dynamix_lab.excavation.hand import HandMotion
from dynamix_lab.excavation.mappo import MAPPOTraining, MAPPOConfig
from dynamix_lab.excavation.lessons import Stage
from dynamix_lab.excavation.learner import evaluate
from dynamix_lab.excavation.resting import Forced, Thresholds
seed=int(sys.argv[1]); name=sys.argv[2]; over=json.loads(sys.argv[3]) if len(sys.argv)>3 else {}
scale=over.pop("scale",1); worlds=over.pop("worlds",16)
cfg=ExperimentConfig.of(ground="single-file"); task=task_of(cfg.task,"mappo-typed")
st=(Stage((1,1,1,1,2,2,2,2),4000*scale,1.0),Stage((1,2,3,4,1,2,3,4),6000*scale,.3),Stage((3,4,5,6,3,4,5,6),8000*scale,.3),Stage((3,4,5,6,8,9,10,12),14000*scale,.3))
def ground(rng):
    s=drawn(rng)
    while s.nest_rows*s.nest_columns<16: s=drawn(rng)
    return s
t=time.time()
m=MAPPOTraining(task,dataclasses.replace(cfg.mappo,traces=True,**{"resters":(0.0,0.4),**over}),stages=st,worlds=worlds,seed=seed,grounds=ground)
def pr(w,d):
    if int(d*200)%10==0 and m.lessons.done%1600==0: print(w,round(d,3),int(time.time()-t),flush=True)
m.run(progress=pr)
torch.save(m.state_dict(),f"/work/main/runs/agent/{name}-{seed}.pt")
print("trained",int(time.time()-t),flush=True)
won=0
for i in range(10):
    rng=np.random.default_rng([4242,i]); s=ground(rng); n=int(rng.integers(3,13))
    tk=dataclasses.replace(task,shape=s)
    row={}
    for label,act,gate in (("team",m.act,None),("hand",HandMotion(tk,seed=i),None),("hand gate",HandMotion(tk,seed=i),lambda env: Thresholds(env,seed=i))):
        row[label]=evaluate(act,tk,agents=n,worlds=16,seed=555_000+i,gate=gate).summary()["pellets_per_1000"]
    best=0
    for k in range(1,n//2+1):
        r=evaluate(m.act,tk,agents=n,worlds=8,seed=555_000+i,gate=functools.partial(Forced,count=k)).summary()["pellets_per_1000"]
        best=max(best,r)
    row["team, best number at rest"]=best
    won+=row["team"]>=max(row["hand"],row["hand gate"])
    print(i,s,n,{k:round(v) for k,v in row.items()},flush=True)
r=evaluate(m.act,task,agents=8,worlds=16,seed=991_000+seed).summary()["pellets_per_1000"]
print("won",won,"single-file 8:",r)
