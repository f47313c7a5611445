"use strict";
// The search of the site: "/" goes there, arrow keys choose a result, Enter opens it, Escape closes the list. The index
// is a text of lab/views/search_index.py. A word also finds longer ones that begin with it.
{
  const field = document.getElementById("search"), list = document.getElementById("found"), most = 20;
  const parts = [...document.querySelectorAll(".view, .view [id]")], words = new Map();
  const read = () => {
    for (const line of document.getElementById("search-index").textContent.trim().split("\n")) {
      const [word, ...steps] = line.split(" ");
      let at = 0;
      words.set(word, steps.map((step) => (at += parseInt(step, 36))));
    }
  };
  const asked = () => field.value.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
  const named = (part) => part.matches(".view") ? part.querySelector("h2") : (part.querySelector("strong") ?? part);
  // The text of a part: up to the next one.
  const textOf = (part) => {
    let text = part.matches(".view") ? part.querySelector("p, li")?.textContent ?? "" : part.textContent;
    for (let next = part.nextElementSibling; next && !next.id && text.length < 2000; next = next.nextElementSibling)
      text += ` ${next.textContent}`;
    return text;
  };
  const around = (text, terms) => {
    const at = Math.max(0, Math.min(...terms.map((term) => text.toLowerCase().indexOf(term)).filter((i) => i >= 0), 1e6));
    const start = at < 1e6 && at > 60 ? text.indexOf(" ", at - 60) + 1 : 0;
    return `${start ? "… " : ""}${text.slice(start, start + 150)}${text.length > start + 150 ? " …" : ""}`;
  };
  // Parts with most of the asked words, those first that are named so.
  const search = (terms) => {
    const scores = new Map();
    for (const term of terms) {
      const having = new Map();
      for (const [word, numbers] of words)
        if (word.startsWith(term)) for (const n of numbers) having.set(n, Math.max(having.get(n) ?? 0, word === term ? 3 : 2));
      for (const [n, score] of having) {
        const title = named(parts[n]).textContent.toLowerCase();
        scores.set(n, (scores.get(n) ?? 0) + 4 + score + (title.includes(term) ? 4 : 0));
      }
    }
    return [...scores].sort((a, b) => b[1] - a[1] || a[0] - b[0]).slice(0, most).map(([n]) => parts[n]);
  };
  const show = () => {
    if (!words.size) read();
    const terms = asked(), results = search(terms);
    list.replaceChildren(
      ...results.map((part) => {
        const item = document.createElement("li"), link = item.appendChild(document.createElement("a"));
        const view = part.closest(".view"), page = view === part ? "" : `${view.querySelector("h2").textContent}: `;
        link.href = `#${part.id}`;
        link.textContent = page + named(part).textContent;
        item.appendChild(document.createElement("span")).textContent = around(textOf(part), terms);
        return item;
      }),
    );
    if (terms.length && !results.length) list.appendChild(document.createElement("li")).textContent = "Nothing found";
    list.hidden = !terms.length;
    field.setAttribute("aria-expanded", String(!list.hidden));
  };
  const close = () => {
    list.hidden = true;
    field.setAttribute("aria-expanded", "false");
  };
  field.addEventListener("input", show);
  field.addEventListener("focus", () => field.value && show());
  field.closest("search").addEventListener("keydown", (event) => {
    const links = [...list.querySelectorAll("a")], at = links.indexOf(document.activeElement);
    const to = { ArrowDown: links[at + 1], ArrowUp: at > 0 ? links[at - 1] : field, Enter: at < 0 ? links[0] : null }[event.key];
    if (event.key === "Escape") {
      field.focus();
      close();
    } else if (list.hidden || !to) return;
    else if (event.key === "Enter") to.click();
    else to.focus();
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target.matches("input, select, textarea")) return;
    event.preventDefault();
    field.focus();
    field.select();
  });
  document.addEventListener("pointerdown", (event) => event.target.closest("search") || close());
  window.addEventListener("hashchange", close);
}
