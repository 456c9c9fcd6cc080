"use strict";
let shown = null;
async function refresh() {
  try {
    const answer = await fetch(location.href, { cache: "no-cache" });
    const text = await answer.text();
    if (answer.ok && text !== shown) {
      const page = new DOMParser().parseFromString(text, "text/html");
      for (const details of page.querySelectorAll("details[id]")) {
        const before = document.getElementById(details.id);
        if (before) details.open = before.open;
      }
      if (shown !== null) document.querySelector("main").replaceWith(page.querySelector("main"));
      document.title = page.title;
      shown = text;
    }
    document.body.classList.toggle("lost", !answer.ok);
  } catch {
    document.body.classList.add("lost");
  }
  setTimeout(refresh, 2000);
}
refresh();
