"""First come, first served."""

from __future__ import annotations

from pageloom.contract import PlanView, RequestView, Scheduler, SchedulerView


class FCFS(Scheduler):
    """Decodes first, then running prefills, then new requests, each in order of admission.

    When blocks run out, the request admitted last gives way, and nobody new is admitted in that
    step. The oldest request can always make room for itself, so every request finishes.
    """

    def schedule(self, view: SchedulerView, plan: PlanView) -> None:
        decodes = [request for request in view.running if not request.is_prefill]
        prefills = [request for request in view.running if request.is_prefill]
        crowded = False
        for request in decodes + prefills:
            if not plan.preemptible(request):
                continue  # gave way to an older one
            while not plan.run(request):
                if plan.refusal != "blocks":
                    break
                crowded = True
                victim = _last_admitted(view, plan)
                plan.preempt(victim)
                if victim is request:
                    break
        if crowded:
            return
        for request in view.waiting:
            if not plan.run(request):
                return


def _last_admitted(view: SchedulerView, plan: PlanView) -> RequestView:
    return next(request for request in reversed(view.running) if plan.preemptible(request))
