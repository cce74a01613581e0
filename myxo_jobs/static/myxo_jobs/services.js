// Follows the jobs whose bars are on a page: asks how each stands, moves its bar, and
// sends job:progress, job:done and job:failed from it, with the status document.
(() => {
  "use strict";
  if (window.myxoJobsFollowed) return;
  window.myxoJobsFollowed = true;

  const LONGEST_WAIT = 60;
  const bars = [];
  let timer = null;

  class Bar {
    constructor(element) {
      this.element = element;
      this.status = element.dataset.status;
      this.address = element.dataset.address;
      this.wait = Number(element.dataset.wait) || 1;
      this.dueAt = Date.now() + this.wait * 1000;
      this.asking = false;
      this.spokenFor = this.keyOf(this.status, false, this.percent());
    }

    find(name) {
      return this.element.querySelector(".myxo-job-" + name);
    }

    percent() {
      const bar = this.element.querySelector("progress");
      return bar.hasAttribute("value") ? bar.value : null;
    }

    follows() {
      return Boolean(this.address) && !["done", "failed", "gone"].includes(this.status);
    }

    async ask() {
      this.asking = true;
      try {
        const answer = await fetch(this.address, {
          headers: { Accept: "application/json" },
          credentials: "same-origin",
        });
        if (answer.status === 404) {
          this.showGone();
          return;
        }
        if (!answer.ok) throw new Error(String(answer.status));
        const told = await answer.json();
        this.wait = Number(answer.headers.get("Retry-After")) || 1;
        this.show(told);
      } catch {
        this.wait = Math.min(this.wait * 2, LONGEST_WAIT);
        this.showFailing();
      } finally {
        this.asking = false;
        this.dueAt = Date.now() + this.wait * 1000;
      }
    }

    show(told) {
      const { words, ...job } = told;
      this.status = job.status;
      this.element.dataset.status = job.status;
      this.moveBar(job);
      this.find("state").textContent = words.state;
      this.showFile(job, words);
      const cancel = this.find("cancel");
      if (cancel) cancel.hidden = !job.cancel_url || job.cancelling;
      this.speak(words.state, this.keyOf(job.status, job.cancelling, job.progress.percent));
      this.tell(job);
    }

    moveBar(job) {
      const bar = this.element.querySelector("progress");
      bar.hidden = job.status === "failed";
      const percent = job.status === "done" ? 100 : job.progress.percent;
      if (percent === null) bar.removeAttribute("value");
      else bar.value = percent;
    }

    showFile(job, words) {
      this.find("file").hidden = !job.download_url;
      if (!job.download_url) return;
      const link = this.find("download");
      link.href = job.download_url;
      link.textContent = words.file;
      this.find("about").textContent = words.about;
    }

    showFailing() {
      this.find("state").textContent = this.element.dataset.failing;
      this.speak(this.element.dataset.failing, "failing");
    }

    showGone() {
      this.status = "gone";
      this.element.dataset.status = "gone";
      this.find("state").textContent = this.element.dataset.gone;
      this.element.querySelector("progress").hidden = true;
      this.find("file").hidden = true;
      const cancel = this.find("cancel");
      if (cancel) cancel.hidden = true;
      this.speak(this.element.dataset.gone, "gone");
    }

    keyOf(status, cancelling, percent) {
      return [status, cancelling, Math.floor((percent || 0) / 25)].join();
    }

    // Aloud only on a change of state and at each quarter, not with every number.
    speak(text, key) {
      if (key === this.spokenFor) return;
      this.spokenFor = key;
      this.find("spoken").textContent = text;
    }

    tell(job) {
      const end = { done: "job:done", failed: "job:failed" };
      const name = end[job.status] || "job:progress";
      this.element.dispatchEvent(new CustomEvent(name, { bubbles: true, detail: job }));
      this.goOn();
    }

    goOn() {
      const then = this.element.dataset.then;
      if (this.status === "done" && then) window.location.replace(then);
    }

    async cancel(form) {
      try {
        const answer = await fetch(form.action, {
          method: "POST",
          headers: { Accept: "application/json" },
          body: new FormData(form),
          credentials: "same-origin",
        });
        // Refused, as after signing out: send it again as a form, whose answer is shown.
        if (answer.status === 403) form.submit();
        this.dueAt = Date.now();
      } catch {
        this.showFailing();
      }
      plan();
    }
  }

  // One timer, for the bar that is due first. A hidden tab asks nothing.
  function plan() {
    clearTimeout(timer);
    if (document.hidden) return;
    const waiting = bars.filter((bar) => bar.follows() && !bar.asking);
    if (!waiting.length) return;
    const next = Math.min(...waiting.map((bar) => bar.dueAt));
    timer = setTimeout(askDue, Math.max(next - Date.now(), 0));
  }

  function askDue() {
    const due = bars.filter((bar) => bar.follows() && !bar.asking && bar.dueAt <= Date.now());
    for (const bar of due) bar.ask().then(plan);
    plan();
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) for (const bar of bars) bar.dueAt = Date.now();
    plan();
  });

  document.addEventListener("submit", (event) => {
    const bar = bars.find((one) => one.find("cancel") === event.target);
    if (!bar) return;
    event.preventDefault();
    bar.cancel(event.target);
  });

  function begin() {
    for (const element of document.querySelectorAll(".myxo-job[data-status]")) {
      const bar = new Bar(element);
      bars.push(bar);
      bar.goOn();
    }
    plan();
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
