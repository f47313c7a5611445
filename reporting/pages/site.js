"use strict";
// One view at a time: the one that the address names after its #, or that holds what the address names. Without this
// script, and in print, all views follow one another.
{
  const views = [...document.querySelectorAll(".view")], links = [...document.querySelectorAll(".pages a")];
  const title = document.title, pages = document.querySelector(".pages"), menu = document.querySelector(".menu");
  const open = (shown) => {
    pages.classList.toggle("open", shown);
    menu.setAttribute("aria-expanded", String(shown));
  };
  const show = (moved) => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const view = target?.closest(".view") ?? views[0], heading = view.querySelector("h2");
    for (const other of views) other.classList.toggle("shown", other === view);
    for (const link of links) {
      const id = link.getAttribute("href").slice(1);
      if (id === view.id) link.setAttribute("aria-current", "page");
      else if (id === view.dataset.group) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    document.title = view === views[0] ? title : `${heading.textContent} – ${title}`;
    open(false);
    const current = pages.querySelector("[aria-current=page]"); // moves the list alone, and not the page
    if (current && moved) pages.scrollTop = current.offsetTop - pages.clientHeight / 2;
    if (target && target !== view) target.scrollIntoView();
    else if (moved) window.scrollTo(0, 0);
    if (moved) heading.focus({ preventScroll: true });
  };
  for (const view of views) view.querySelector("h2").tabIndex = -1;
  menu.addEventListener("click", () => open(!pages.classList.contains("open")));
  pages.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !pages.classList.contains("open")) return;
    open(false);
    menu.focus();
  });
  window.addEventListener("hashchange", () => show(true));
  show(false);
}
