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
            # It may have given way to an older one already, or have to give way itself.
            while plan.preemptible(request) and not plan.run(request) and plan.refusal == "blocks":
                plan.preempt(_last_admitted(view, plan))
                crowded = True
        if crowded:
            return
        for request in view.waiting:
            if not plan.run(request):
                return


def _last_admitted(view: SchedulerView, plan: PlanView) -> RequestView:
    return next(request for request in reversed(view.running) if plan.preemptible(request))
