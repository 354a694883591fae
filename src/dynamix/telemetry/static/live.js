"use strict";
// The live page: asks for the data whenever the server says that there are new ones, at most once a second.

const live = { wanted: true, busy: false, last: 0 };
const mark = el("span", { class: "live", text: "live" });
document.querySelector("header").prepend(mark);

const lost = (text) => {
  mark.textContent = text;
  mark.classList.add("lost");
};

const fetchData = async () => {
  if (!live.wanted || live.busy || document.hidden) return;
  const wait = 1000 - (performance.now() - live.last);
  if (live.last && wait > 0) { setTimeout(fetchData, wait); return; }
  live.busy = true;
  live.wanted = false;
  try {
    const answer = await fetch("data.json");
    if (!answer.ok) throw new Error(String(answer.status));
    page.data = await answer.json();
    show();
    mark.textContent = page.data.ended ? "ended" : "live";
    mark.classList.remove("lost");
    performance.mark("drawn");
    document.documentElement.dataset.version = String(page.data.version);
  } catch (error) {
    live.wanted = true;
    lost("not connected");
  }
  live.busy = false;
  live.last = performance.now();
  if (live.wanted) setTimeout(fetchData, 1000);
};

const follow = () => {
  const news = new EventSource("news");
  news.onmessage = (event) => {
    if (!page.data || Number(event.data) !== page.data.version) live.wanted = true;
    fetchData();
  };
  news.onerror = () => lost("not connected");
};

document.addEventListener("visibilitychange", fetchData);
follow();
