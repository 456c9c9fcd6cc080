"use strict";
let shown = null;
const pause = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));
async function refresh() {
  while (true) {
    try {
      const answer = await fetch(location.href, { cache: "no-cache" });
      const text = await answer.text();
      if (answer.ok && text !== shown) {
        const page = new DOMParser().parseFromString(text, "text/html");
        for (const details of page.querySelectorAll("details[id]")) {
          const before = document.getElementById(details.id);
          if (before) details.open = before.open;
        }
        if (shown !== null) {
          document.querySelector("main").replaceWith(page.querySelector("main"));
          drawCharts(document.querySelector("main"));
        }
        document.title = page.title;
        shown = text;
      }
      document.body.classList.toggle("lost", !answer.ok);
    } catch {
      document.body.classList.add("lost");
    }
    await pause(2);
  }
}
async function follow() {  // a hidden page asks for nothing
  const now = document.getElementById("now");
  while (true) {
    try {
      if (!document.hidden) {
        const answer = await fetch("/now");
        now.innerHTML = answer.status === 200 ? await answer.text() : "";
        drawCharts(now);
      }
    } catch {
      now.innerHTML = "";
    }
    await pause(1);
  }
}
refresh();
follow();
